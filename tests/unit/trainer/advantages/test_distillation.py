"""The teacher's word on each sampled token is its advantage, alone or beside that of the reward."""

from dataclasses import replace

import numpy as np
import pytest

from configs.schema import AlgorithmConfig, Config, TeacherConfig
from rollout.types import TrajectoryGroup
from tests.support.reference import make_group, make_trajectory
from tests.support.sequences import only, with_sequence
from trainer.advantages.credit import Credit, assign_credit
from trainer.tokens import sampled_tokens

TEACHER = np.array([-0.5, 0, -3, -0.25], np.float32)


def groups() -> list[TrajectoryGroup]:
    """Two turns of one token and one more trajectory of two, then an only trajectory whose reward has failed."""
    turns = make_trajectory([1], [7, 4, 9], loss_mask=[True, False, True], rollout_logprobs=[-1, 0, -2], reward=1.0)
    plain = make_trajectory([1], [8, 6], rollout_logprobs=[-1, -0.25])
    failed = make_trajectory([2], [5], error="no reward", rollout_logprobs=[-1])
    turns = with_sequence(turns, teacher_logprobs=np.array([-0.5, 0, -3], np.float32))
    plain = with_sequence(plain, teacher_logprobs=np.array([-0.25, -0.25], np.float32))
    failed = with_sequence(failed, teacher_logprobs=np.array([-9], np.float32))
    return [make_group(0, [turns, plain]), make_group(1, [failed])]


def credit(groups: list[TrajectoryGroup], **algorithm: object) -> Credit:
    config = Config(
        algorithm=AlgorithmConfig(**algorithm),  # pyright: ignore[reportArgumentType]
        teacher=TeacherConfig(path="a/teacher"),
    )
    return assign_credit(groups, sampled_tokens(groups, 3), {}, config, 3)


def test_the_advantage_of_a_token_is_how_much_more_likely_the_teacher_finds_it() -> None:
    """Whatever follows it, and whatever the reward is."""
    found = credit(groups(), advantage="opd")
    assert found.tokens.targets.tolist() == [7, 9, 8, 6]
    assert found.tokens.advantages.tolist() == [0.5, -1, 0.75, 0]
    assert [advantages.tolist() for advantages in found.advantages] == [[-0.25, 0.375], [0]]
    assert found.metrics == {"teacher/kl": pytest.approx(-0.25 / 4)}
    assert found.tokens.teacher_logprobs is not None
    halved = credit(groups(), advantage="opd", teacher_coef=0.5)
    assert halved.tokens.advantages.tolist() == [0.25, -0.5, 0.375, 0] and halved.metrics == found.metrics


def test_it_is_added_to_the_advantage_of_the_reward() -> None:
    """The advantage of grpo without the division is a half for the trajectory of reward 1, and minus a half for the
    other."""
    found = credit(groups(), normalize_by_std=False, teacher_coef=2.0)
    assert found.tokens.advantages.tolist() == [0.5 + 1, 0.5 - 2, -0.5 + 1.5, -0.5]
    assert [advantages.tolist() for advantages in found.advantages] == [[0, 0.25], [0]]


def test_one_trajectory_is_enough() -> None:
    alone = [replace(groups()[0], trajectories=groups()[0].trajectories[:1])]
    assert credit(alone, advantage="opd").tokens.advantages.tolist() == [0.5, -1]


def test_tokens_that_no_teacher_has_scored_are_an_error() -> None:
    """A single one of the step is: it must not count as if teacher and policy agreed."""
    first, second = groups()
    unscored = with_sequence(second.trajectories[0], teacher_logprobs=None)
    with pytest.raises(ValueError, match="no teacher has scored the tokens of this batch"):
        credit([first, replace(second, trajectories=(unscored,))], advantage="opd")


def test_without_a_teacher_its_logprobs_change_nothing() -> None:
    plain = [
        replace(g, trajectories=tuple(with_sequence(t, teacher_logprobs=None) for t in g.trajectories))
        for g in groups()
    ]
    found = [assign_credit(some, sampled_tokens(some, 3), {}, Config(), 3) for some in (plain, groups())]
    assert np.array_equal(found[0].tokens.advantages, found[1].tokens.advantages) and found[1].metrics == {}
    assert only(plain[1].trajectories[0]).teacher_logprobs is None
