"""Group advantages: golden numbers, and what must not change them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.types import FloatArray
from trainer.advantage import grpo


def rewards(*values: float) -> FloatArray:
    return np.array(values, np.float32)


def test_one_of_four_is_right() -> None:
    # mean 0.25; unbiased std sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5
    np.testing.assert_allclose(grpo(rewards(1, 0, 0, 0)), [1.499997, -0.499999, -0.499999, -0.499999], rtol=1e-7)


def test_graded_rewards() -> None:
    # mean 0.5; unbiased std sqrt((0.5^2 + 0.25^2 + 0.25^2 + 0.5^2) / 3) = 0.4564355
    np.testing.assert_allclose(
        grpo(rewards(0, 0.25, 0.75, 1)), [-1.0954427, -0.5477214, 0.5477214, 1.0954427], rtol=1e-6
    )


def test_without_the_division_by_the_standard_deviation() -> None:
    assert grpo(rewards(1, 0, 0, 0), normalize_by_std=False).tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7.7, 1e20])
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(value: float, normalize: bool) -> None:
    for size in (1, 2, 7):
        assert grpo(rewards(*[value] * size), normalize).tolist() == [0.0] * size


def test_a_nan_reward_is_not_hidden() -> None:
    assert np.isnan(grpo(rewards(1, np.nan, 0))).all()


def test_type_is_float32_and_the_rewards_stay_as_they_were() -> None:
    given_rewards = rewards(1, 0, 1)
    assert grpo(given_rewards).dtype == np.float32
    assert grpo(rewards(1, 1)).dtype == np.float32
    assert given_rewards.tolist() == [1, 0, 1]


some_rewards = st.lists(st.integers(-8, 8), min_size=2, max_size=16).map(lambda values: rewards(*values) / 4)


@given(some_rewards, st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(some: FloatArray, normalize: bool) -> None:
    advantages = grpo(some, normalize)
    assert abs(advantages.sum(dtype=np.float64)) < 1e-5
    for i in range(len(some)):
        for j in range(len(some)):
            assert (advantages[i] < advantages[j]) == (some[i] < some[j])


@given(some_rewards)
def test_neither_offset_nor_scale_of_the_reward_matters_when_normalized(some: FloatArray) -> None:
    np.testing.assert_allclose(grpo(some * 8 + 16), grpo(some), atol=2e-5)
