"""Generalised advantage estimation against the definition as a sum, and what whitening does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.types import FloatArray, TurnReward
from tests.support.reference import make_trajectory
from tests.support.sequences import with_sequence
from trainer.advantages.gae import gae, token_rewards, whiten


def floats(*values: float) -> FloatArray:
    return np.array(values, np.float32)


def numbered(*lengths: int) -> np.ndarray:
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over k of (gamma lam)^k delta_{t+k}"""
    following = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


one_token = st.tuples(st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(one_token, max_size=6), max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_every_trajectory_is_estimated_alone(
    trajectories: list[list[tuple[float, float]]], gamma: float, lam: float
) -> None:
    flat = [token for trajectory in trajectories for token in trajectory]
    rewards, values = floats(*(r for r, _ in flat)), floats(*(v for _, v in flat))
    found = gae(rewards, values, numbered(*map(len, trajectories)), gamma, lam)
    expected = [a for t in trajectories for a in by_definition([r for r, _ in t], [v for _, v in t], gamma, lam)]
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_turns_reward_comes_with_its_last_loss_token_and_every_branch_ends_with_the_rest() -> None:
    """The turns got 1 and 2 of the reward of 5. The first turn ends with a token that is not trained."""
    whole = make_trajectory([1], [2] * 4, loss_mask=[True, True, False, True])
    turns = with_sequence(whole, turn_rewards=(TurnReward(3, 1.0, 0), TurnReward(4, 2.0, 1)))
    (branch,) = make_trajectory([1, 2], [3, 3]).sequences
    both = replace(turns, sequences=(*turns.sequences, branch))
    assert token_rewards([both], floats(5)).tolist() == [0, 1, 2 + 2, 0, 2]


def test_whitening_by_hand() -> None:
    assert whiten(floats(1, 2, 3)).tolist() == pytest.approx([-1, 0, 1])  # unbiased variance 1
    assert whiten(floats(4, 4)).tolist() == [0, 0]
    assert whiten(floats(4)).tolist() == [0]


def test_a_masked_turns_reward_is_nobodys_unless_a_token_came_before() -> None:
    """Turn 0 got 5 and is masked; turn 1 got 1. In the second trajectory turn 0 is trained, and turn 1 masked."""
    turns = (TurnReward(3, 5.0, 0), TurnReward(6, 1.0, 1))
    for mask, expected in (([False] * 3 + [True] * 3, [0, 0, 1]), ([True] * 3 + [False] * 3, [0, 0, 5 + 1])):
        whole = with_sequence(make_trajectory([1], [2] * 6, loss_mask=mask, reward=6.0), turn_rewards=turns)
        assert token_rewards([whole], floats(6)).tolist() == expected


def test_what_turns_do_not_bring_is_not_their_rounding() -> None:
    turns = tuple(TurnReward(number + 1, reward, number) for number, reward in enumerate([0.1, 0.2, 0.3]))
    whole = with_sequence(make_trajectory([1], [2] * 3, reward=0.1 + 0.2 + 0.3), turn_rewards=turns)
    assert token_rewards([whole], np.array([whole.reward])).tolist() == [0.1, 0.2, 0.3]
