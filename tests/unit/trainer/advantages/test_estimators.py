"""Advantage estimators: a slow reference written another way, and which trajectories take part."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.algorithm import GROUP_ADVANTAGES
from configs.schema import AlgorithmConfig
from rollout.types import FloatArray, Trajectory, TrajectoryGroup
from tests.support.reference import make_group, make_trajectory
from trainer.advantages.estimators import (
    ESTIMATORS,
    Estimator,
    ScoredGroup,
    group_advantages,
    grpo,
    load_estimator,
)

PLAIN = AlgorithmConfig()
NO_STD = AlgorithmConfig(normalize_by_std=False)
GDPO = {"right": 1.0, "short": -0.5}
WITHIN_GROUPS = ("grpo", "rloo", "opo", "grpo_passk", "gpg", "maxrl")
"""The estimators whose advantage is 0 in a group of equal rewards."""


def group(*rewards: float, lengths: Sequence[int] | None = None) -> ScoredGroup:
    lengths = lengths or [5] * len(rewards)
    terms = {"right": np.array(rewards, np.float64), "short": np.array(lengths, np.float64) % 3}
    return ScoredGroup(rewards=np.array(rewards, np.float32), lengths=np.array(lengths, np.int32), terms=terms)


def advantages(name: str, *groups: ScoredGroup, algorithm: AlgorithmConfig = PLAIN) -> list[list[float]]:
    return [some.tolist() for some in ESTIMATORS[name](groups, algorithm)]


def exact(name: str, groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[list[float]]:
    """In fractions, token by token where the definition speaks of tokens."""
    rewards = [[Fraction(float(r)) for r in g.rewards] for g in groups]
    lengths = [[int(n) for n in g.lengths] for g in groups]
    if name == "gdpo":
        parts = [[normalized(g.terms[term].tolist(), algorithm) for term in GDPO] for g in groups]
        rewards = [[Fraction(a - 0.5 * b) for a, b in zip(*part, strict=True)] for part in parts]
    if name == "reinforce_plus_plus_baseline":
        rewards = [[r - sum(some) / len(some) for r in some] for some in rewards]
    if name in ("reinforce_plus_plus_baseline", "gdpo"):
        pairs = zip(sum(rewards, []), sum(lengths, []), strict=True)
        tokens = [r for r, n in pairs for _ in range(n)]
        mean = sum(tokens) / len(tokens)
        std = math.sqrt(sum((t - mean) ** 2 for t in tokens) / (len(tokens) - 1) + Fraction(1, 10**8))
        return [[float(r - mean) / std for r in some] for some in rewards]
    results = []
    for some, sizes in zip(rewards, lengths, strict=True):
        mean = sum(some) / len(some)
        std = (
            math.sqrt(sum((r - mean) ** 2 for r in some) / (len(some) - 1)) + 1e-6 if algorithm.normalize_by_std else 1
        )
        if name == "grpo":
            results.append([float(r - mean) / std for r in some])
        elif name == "rloo":
            others = [[r for j, r in enumerate(some) if j != i] for i in range(len(some))]
            results.append([float(r - sum(rest) / len(rest)) for r, rest in zip(some, others, strict=True)])
        elif name == "opo":
            tokens = [r for r, n in zip(some, sizes, strict=True) for _ in range(n)]
            results.append([float(r - sum(tokens) / len(tokens)) for r in some])
        elif name == "grpo_passk":
            best = some.index(max(some))
            runner_up = max(some[:best] + some[best + 1 :])
            results.append([float(r - runner_up) / std if i == best else 0.0 for i, r in enumerate(some)])
        elif name == "maxrl":
            results.append([float(r / mean) - 1 if mean > 0 else 0.0 for r in some])
        else:
            assert name == "gpg"
            without = sum(len(other) for other in rewards if len(set(other)) == 1)
            alpha = Fraction(sum(map(len, rewards)), max(1, sum(map(len, rewards)) - without))
            results.append([float(alpha * (r - mean)) for r in some])
    return results


def normalized(values: list[float], algorithm: AlgorithmConfig) -> list[float]:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) + 1e-6
    return [(v - mean) / (std if algorithm.normalize_by_std else 1) for v in values]


def draw_group(values: list[tuple[int, int]]) -> ScoredGroup:
    return group(*(reward / 4 for reward, _ in values), lengths=[n for _, n in values])


some_groups = st.lists(
    st.lists(st.tuples(st.integers(-8, 8), st.integers(1, 9)), min_size=2, max_size=9).map(draw_group),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(groups=some_groups, normalize=st.booleans())
def test_every_estimator_is_what_its_definition_says(name: str, groups: list[ScoredGroup], normalize: bool) -> None:
    algorithm = AlgorithmConfig(normalize_by_std=normalize, gdpo_weights=GDPO)
    if name == "maxrl":
        groups = [replace(each, rewards=np.abs(each.rewards)) for each in groups]
    for given_advantages, expected in zip(
        ESTIMATORS[name](groups, algorithm), exact(name, groups, algorithm), strict=True
    ):
        assert given_advantages.dtype == np.float32
        np.testing.assert_allclose(given_advantages, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", WITHIN_GROUPS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7.7, 1e20])
def test_equal_rewards_give_exactly_zero(name: str, value: float) -> None:
    value = abs(value) if name == "maxrl" else value
    for size in (2, 3, 7):
        lengths = list(range(1, size + 1))
        assert advantages(name, group(*[value] * size, lengths=lengths), group(1, 0))[0] == [0.0] * size


@pytest.mark.parametrize("value", [0.0, 0.1, 1e20])
def test_a_batch_of_equal_rewards_gives_exactly_zero(value: float) -> None:
    name = "reinforce_plus_plus_baseline"
    assert advantages(name, group(value, value), group(value, value, lengths=[1, 9])) == [[0, 0], [0, 0]]


def test_configs_and_trainer_name_the_same_estimators() -> None:
    assert tuple(ESTIMATORS) == GROUP_ADVANTAGES
    assert all(load_estimator(name) is estimator for name, estimator in ESTIMATORS.items())


def test_an_estimator_of_the_users_own_comes_by_dotted_path() -> None:
    assert load_estimator("trainer.advantages.estimators:rloo") is ESTIMATORS["rloo"]
    with pytest.raises(ValueError, match="algorithm.advantage=grop: must be one of grpo, rloo, "):
        load_estimator("grop")
    with pytest.raises(ValueError, match=r"must be callable with \(groups, algorithm\)"):
        load_estimator("trainer.advantages.estimators:load_estimator")


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
    return group_advantages(groups, rewards, estimator, algorithm)


def grpo_of(*groups: list[Trajectory]) -> list[list[float]]:
    made = [make_group(ordinal, group) for ordinal, group in enumerate(groups)]
    return [some.tolist() for some in estimated(made, grpo)]


def test_failed_rewards_and_aborted_trajectories_count_in_no_baseline() -> None:
    """The baseline is mean(1, 0) = 0.5, whatever the failed ones would have got; an aborted one has half an answer."""
    assert grpo_of(rewarded(None, 1, None, 0), rewarded(3, 2, 2, 1)) == [[0, 0.5, 0, -0.5], [1, 0, 0, -1]]
    half = make_trajectory([1], [2], reward=9, finish_reason="abort")
    nothing = make_trajectory([1], [], spans=(), finish_reason="abort")
    assert grpo_of([half, *rewarded(1, 0), nothing]) == [[0, 0.5, -0.5, 0]]


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


def test_gdpo_reads_the_rewards_that_its_weights_name() -> None:
    """The second varies a thousand times as much, and does not count more."""
    algorithm = AlgorithmConfig(advantage="gdpo", gdpo_weights={"right": 1, "close": 1})
    metrics = ({"right": 1.0, "close": 0.0}, {"right": 0.0, "close": 1000.0}, {"right": 0.0, "close": 0.0})
    trajectories = [replace(make_trajectory([1], [7, 8], reward=5.0), reward_metrics=own) for own in metrics]
    groups, rewards = [make_group(3, trajectories)], [np.full(3, 5.0)]
    (found,) = group_advantages(groups, rewards, ESTIMATORS["gdpo"], algorithm)
    assert found[0] == pytest.approx(found[1], abs=1e-5) and found[0] > 0 > found[2]
    other = replace(algorithm, gdpo_weights={"right": 1, "format": 1})
    with pytest.raises(ValueError, match=r"the reward of prompt 3 reported right, close, and no 'format'"):
        group_advantages(groups, rewards, ESTIMATORS["gdpo"], other)


def test_maxrl_takes_no_reward_below_0() -> None:
    with pytest.raises(ValueError, match=r"^algorithm.advantage=maxrl: a reward is -0.5, and may not be below 0$"):
        ESTIMATORS["maxrl"]([group(1, 0), group(1, -0.5, -0.49)], AlgorithmConfig())
