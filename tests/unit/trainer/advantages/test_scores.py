"""From groups to advantages: what takes part, what leaves the loss, and a user's own estimator that answers wrongly."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from configs.schema import AlgorithmConfig
from rollout.types import FloatArray, Trajectory, TrajectoryGroup
from tests.support.reference import make_group, make_trajectory
from trainer.advantages.estimators import Estimator, ScoredGroup, grpo, remax
from trainer.advantages.scores import advantages_of, trainable

NO_STD = AlgorithmConfig(normalize_by_std=False)


def rewarded(*rewards: float | None) -> list[Trajectory]:
    """None: the reward failed."""
    return [
        make_trajectory([1], [2, 3], error="no") if reward is None else make_trajectory([1], [2, 3], reward=reward)
        for reward in rewards
    ]


def estimated(
    groups: Sequence[TrajectoryGroup], estimator: Estimator, algorithm: AlgorithmConfig = NO_STD
) -> list[FloatArray]:
    rewards = [np.array([t.shaped_reward for t in group.trajectories], np.float32) for group in groups]
    return advantages_of(groups, rewards, estimator, algorithm)


def advantages(*groups: list[Trajectory]) -> list[list[float]]:
    made = [make_group(ordinal, group) for ordinal, group in enumerate(groups)]
    return [some.tolist() for some in estimated(made, grpo)]


def test_a_failed_reward_counts_in_no_baseline() -> None:
    """mean(1, 0) = 0.5, whatever the failed ones would have got."""
    assert advantages(rewarded(None, 1, None, 0), rewarded(3, 2, 2, 1)) == [[0, 0.5, 0, -0.5], [1, 0, 0, -1]]


def test_an_aborted_trajectory_counts_in_no_baseline_and_is_not_trained() -> None:
    """Its reward is of half an answer."""
    half = make_trajectory([1], [2], reward=9, finish_reason="abort")
    nothing = make_trajectory([1], [], spans=(), finish_reason="abort")
    group = [half, *rewarded(1, 0), nothing]
    assert advantages(group) == [[0, 0.5, -0.5, 0]]
    [masked] = trainable([make_group(0, group)], mask_truncated=False)
    masks = [trajectory.loss_mask.tolist() for trajectory in masked.trajectories]
    assert masks == [[False], [True] * 2, [True] * 2, []]


def test_a_group_with_fewer_than_two_rewards_learns_nothing() -> None:
    """Whatever the estimator, which is not even asked where no group has two."""

    def rewards(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[FloatArray]:
        assert groups
        return [group.rewards for group in groups]

    lonely = [make_group(0, rewarded(None, 7)), make_group(1, rewarded(None, None))]
    assert [some.tolist() for some in estimated(lonely, rewards)] == [[0, 0], [0, 0]]
    groups = [*lonely, make_group(2, rewarded(1, 3))]
    assert [some.tolist() for some in estimated(groups, rewards)] == [[0, 0], [0, 0], [1, 3]]


def test_the_estimator_sees_what_is_learned_and_which_tokens_are_the_policys() -> None:
    seen: list[ScoredGroup] = []

    def look(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[FloatArray]:
        assert algorithm is NO_STD
        seen.extend(groups)
        return [group.rewards for group in groups]

    tool = make_trajectory([1], [2, 3, 4, 5], loss_mask=[True, False, False, True], reward=1.0)
    late = make_trajectory([1], [2, 3, 4], reward=1.0, overlong_penalty=-0.25)
    nothing_fresh = make_trajectory([1], [2, 3, 4], loss_mask=[False] * 3)
    group = make_group(0, [tool, late, nothing_fresh])
    assert estimated([group], look)[0].tolist() == [1, 0.75, 0]
    (scored,) = seen
    assert scored.rewards.tolist() == [1, 0.75, 0]
    assert scored.lengths.tolist() == [2, 3, 1], "at least one token, so that an average over tokens exists"
    assert scored.greedy_reward is None


def test_remax_compares_with_the_greedy_trajectory_unless_its_reward_failed() -> None:
    greedy = make_trajectory([1], [2], reward=1.0, overlong_penalty=-0.5)
    group = replace(make_group(0, rewarded(1, 0)), greedy=greedy)
    assert estimated([group], remax)[0].tolist() == [0.5, -0.5]
    failed = replace(group, greedy=replace(greedy, error="no"))
    assert estimated([failed], remax)[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[1.0, 2.0]], r"gave arrays of shape \[\(2,\)\], not \[\(2,\), \(2,\)\]"),
        ([[1.0, 2.0], [1.0]], r"gave arrays of shape \[\(2,\), \(1,\)\]"),
        ([[1.0, 2.0], [[1.0], [2.0]]], r"gave arrays of shape \[\(2,\), \(2, 1\)\]"),
        ([[1.0, 2.0], [np.nan, 2.0]], r"gave \[nan, 2.0\] for prompt 1"),
        ([[1.0, np.inf], [1.0, 2.0]], r"gave .* for prompt 0"),
    ],
)
def test_an_estimator_that_answers_wrongly_is_named(answer: list[FloatArray], message: str) -> None:
    groups = [make_group(ordinal, rewarded(1, 0)) for ordinal in range(2)]
    algorithm = AlgorithmConfig(advantage="own:estimator")
    with pytest.raises(ValueError, match=f"algorithm.advantage=own:estimator: {message}"):
        estimated(groups, lambda groups, algorithm: answer, algorithm)


@pytest.mark.parametrize(("mask_truncated", "kept"), [(False, [2, 2, 0]), (True, [2, 0, 0])])
def test_truncated_and_failed_trajectories_leave_the_loss(mask_truncated: bool, kept: list[int]) -> None:
    cut = make_trajectory([1], [2, 3], reward=0.0, finish_reason="length")
    group = make_group(0, [make_trajectory([1], [2, 3], reward=1.0), cut, make_trajectory([1], [2, 3], error="no")])
    (masked,) = trainable([group], mask_truncated)
    assert [int(trajectory.loss_mask.sum()) for trajectory in masked.trajectories] == kept
    assert [int(trajectory.loss_mask.sum()) for trajectory in group.trajectories] == [2, 2, 2], "the input stays"
    # The reward of the cut one is part of the baseline either way: mean(1, 0) = 0.5.
    assert estimated([group], grpo)[0].tolist() == [0.5, -0.5, 0]
