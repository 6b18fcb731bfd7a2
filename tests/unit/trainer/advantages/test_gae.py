"""Generalised advantage estimation against the definition as a sum, and what whitening does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.types import FloatArray
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


def test_the_reward_comes_with_the_last_token_of_its_trajectory() -> None:
    """The second trajectory has no token."""
    assert token_rewards(floats(5, 6, 7, 8), numbered(2, 0, 1, 3)).tolist() == [0, 5, 7, 0, 0, 8]
    assert token_rewards(floats(5), numbered(0)).tolist() == []


def test_whitening_by_hand() -> None:
    assert whiten(floats(1, 2, 3)).tolist() == pytest.approx([-1, 0, 1])  # unbiased variance 1
    assert whiten(floats(4, 4)).tolist() == [0, 0]
    assert whiten(floats(4)).tolist() == [0]
