"""Off-policy corrections: golden numbers, what carries gradient, and that the weights correct what they should."""

import math

import pytest
import torch
from torch import Tensor

from configs.algorithm import Proximal
from trainer.importance import effective_sample_size, proximal_logprobs, truncated_importance_weights
from trainer.loss import ppo_clip


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_the_proximal_policy_is_the_rollouts_or_the_current_one_without_gradient() -> None:
    logprobs = log(0.5, 0.25).requires_grad_()
    rollout_logprobs = log(0.4, 0.3)
    assert torch.equal(proximal_logprobs(logprobs, rollout_logprobs, Proximal.rollout), rollout_logprobs)
    current = proximal_logprobs(logprobs, rollout_logprobs, Proximal.current)
    assert torch.equal(current, logprobs)
    assert not current.requires_grad


def test_weights_are_the_ratio_up_to_the_cap() -> None:
    # 0.5 / 0.25 = 2, 0.1 / 0.4 = 0.25, 0.9 / 0.3 = 3 -> 2, 0.2 / 0.2 = 1
    weights = truncated_importance_weights(log(0.5, 0.1, 0.9, 0.2), log(0.25, 0.4, 0.3, 0.2), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([2.0, 0.25, 2.0, 1.0], dtype=torch.float64))


def test_weights_carry_no_gradient_and_stay_finite() -> None:
    old = torch.tensor([0.0, -2000.0], requires_grad=True)
    weights = truncated_importance_weights(old, torch.tensor([-2000.0, 0.0]), cap=2.0)
    assert weights.tolist() == [2.0, 0.0]
    assert not weights.requires_grad


def test_the_proximal_rollout_has_weights_of_exactly_one() -> None:
    rollout_logprobs = log(0.3, 1e-9, 1.0)
    old = proximal_logprobs(log(0.9, 0.9, 0.9), rollout_logprobs, Proximal.rollout)
    assert truncated_importance_weights(old, rollout_logprobs, cap=2.0).tolist() == [1.0, 1.0, 1.0]


def test_uncapped_weights_give_the_gradient_of_the_unclipped_ratio() -> None:
    """d/dx [w ratio(x, x) A] with w = pi_old / mu is pi / mu A, the gradient of the plain importance-sampled loss."""
    rollout_logprobs, advantages = log(0.5, 0.2, 0.1), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    logprobs = log(0.25, 0.3, 0.4).requires_grad_()
    old = proximal_logprobs(logprobs, rollout_logprobs, Proximal.current)
    weights = truncated_importance_weights(old, rollout_logprobs, cap=100.0)
    loss, is_clipped = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.28, clip_c=3.0)
    (loss * weights).sum().backward()
    assert not is_clipped.any()
    expected = -advantages * torch.tensor([0.5, 1.5, 4.0], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.0),
        ([2.0, 2.0], 1.0),
        ([7.0], 1.0),
        ([1.0, 2.0, 3.0], 36 / (3 * 14)),
        ([1.0, 0.0, 0.0, 0.0], 0.25),
    ],
)
def test_effective_sample_size(weights: list[float], expected: float) -> None:
    assert effective_sample_size(log(*weights)).item() == pytest.approx(expected, rel=1e-12)


def test_effective_sample_size_of_far_away_policies_is_a_number() -> None:
    """exp(60) squared is beyond float32."""
    log_ratio = torch.tensor([60.0, 60.0 - math.log(2), -60.0, -200.0])
    assert effective_sample_size(log_ratio).item() == pytest.approx(1.5**2 / (4 * 1.25), rel=1e-5)
    assert effective_sample_size(torch.tensor([-200.0, -200.0])).item() == pytest.approx(1.0)
