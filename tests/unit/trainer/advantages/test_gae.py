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


def test_the_reward_comes_with_the_last_loss_token_of_its_trajectory() -> None:
    """The second trajectory has no token that is trained."""
    masks = [True, True], [False], [False, True, False], [True] * 3
    trajectories = [make_trajectory([1], [2] * len(mask), loss_mask=mask) for mask in masks]
    assert token_rewards(trajectories, floats(5, 6, 7, 8)).tolist() == [0, 5, 7, 0, 0, 8]
    assert token_rewards([], floats()).tolist() == []


def test_a_turns_reward_comes_with_its_last_loss_token_and_every_branch_ends_with_the_rest() -> None:
    """Of 5, the turns got 1 and 2. The first turn ends with a token that is not trained."""
    whole = make_trajectory([1], [2] * 4, loss_mask=[True, True, False, True])
    turns = with_sequence(whole, turn_rewards=(TurnReward(3, 1.0, 0), TurnReward(4, 2.0, 1)))
    (branch,) = make_trajectory([1, 2], [3, 3]).sequences
    both = replace(turns, sequences=(*turns.sequences, branch))
    assert token_rewards([both], floats(5)).tolist() == [0, 1, 2 + 2, 0, 2]


def test_whitening_by_hand() -> None:
    assert whiten(floats(1, 2, 3)).tolist() == pytest.approx([-1, 0, 1])  # unbiased variance 1
    assert whiten(floats(4, 4)).tolist() == [0, 0]
    assert whiten(floats(4)).tolist() == [0]
