"""PPO's clipped surrogate: every region of the ratio by hand, values and gradients."""

import math

import pytest
import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from tests.support.losses import make_tokens
from trainer.losses.policy import ppo_clip


def ppo(ratio: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.28, c: float = 3.0) -> tuple[Tensor, ...]:
    """(loss, is_clipped, d loss / d logprobs) for ratios of the current to the old policy."""
    old = torch.full_like(ratio, -3.0)
    logprobs = (old + ratio.log()).requires_grad_()
    algorithm = AlgorithmConfig(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c)
    loss, is_clipped = ppo_clip(make_tokens(logprobs, old, advantages), algorithm)
    loss.sum().backward()
    assert logprobs.grad is not None
    return loss.detach(), is_clipped, logprobs.grad


def scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


# d loss / d logprob is -A r where the ratio is free, and 0 where it is held.
REGIONS = {
    "on policy, good": (1.0, 1.0, -1.0, -1.0, False),
    "on policy, bad": (1.0, -1.0, 1.0, 1.0, False),
    "good, more likely, inside": (1.25, 2.0, -2.5, -2.5, False),
    "good, more likely, clipped high": (1.5, 2.0, -2.56, 0.0, True),
    "good, less likely: never clipped": (0.1, 2.0, -0.2, -0.2, False),
    "bad, less likely, inside": (0.85, -2.0, 1.7, 1.7, False),
    "bad, less likely, clipped low": (0.75, -2.0, 1.6, 0.0, True),
    "bad, more likely: free up to c": (2.9, -2.0, 5.8, 5.8, False),
    "bad, far more likely: dual clip": (4.0, -2.0, 6.0, 0.0, False),
    "good, far more likely: c plays no part": (4.0, 2.0, -2.56, 0.0, True),
    "no advantage": (5.0, 0.0, 0.0, 0.0, False),
}


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped"), REGIONS.values(), ids=REGIONS.keys())
def test_every_region(ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    found, is_clipped, found_gradient = ppo(scalar(ratio), scalar(advantage))
    assert found.item() == pytest.approx(loss, rel=1e-12)
    assert found_gradient.item() == pytest.approx(gradient, rel=1e-12)
    assert is_clipped.tolist() == [clipped]


def test_low_and_high_are_separate_bounds() -> None:
    ratio = torch.tensor([0.55, 1.55], dtype=torch.float64)
    advantages = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    assert ppo(ratio, advantages, low=0.5, high=0.1)[1].tolist() == [False, True]
    assert ppo(ratio, advantages, low=0.1, high=0.6)[1].tolist() == [True, False]
    torch.testing.assert_close(
        ppo(ratio, advantages, low=0.1, high=0.1)[0], torch.tensor([0.9, -1.1], dtype=torch.float64)
    )


def test_tokens_do_not_mix() -> None:
    ratio = torch.tensor([row[0] for row in REGIONS.values()], dtype=torch.float64)
    advantages = torch.tensor([row[1] for row in REGIONS.values()], dtype=torch.float64)
    loss, is_clipped, gradient = ppo(ratio, advantages)
    torch.testing.assert_close(loss, torch.tensor([row[2] for row in REGIONS.values()], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([row[3] for row in REGIONS.values()], dtype=torch.float64))
    assert is_clipped.tolist() == [row[4] for row in REGIONS.values()]


def test_gradient_is_the_derivative_of_the_value() -> None:
    random = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(60, generator=random, dtype=torch.float64)
    logprobs = (old + 1.5 * torch.randn(60, generator=random, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(60, generator=random, dtype=torch.float64)

    def loss_of(x: Tensor) -> Tensor:
        return ppo_clip(make_tokens(x, old, advantages), AlgorithmConfig())[0]

    assert torch.autograd.gradcheck(loss_of, logprobs)


def test_no_room_at_all_still_has_the_on_policy_gradient() -> None:
    """clip_ratio_low = clip_ratio_high = 0: on the edge, where r = 1, the gradient is that of r."""
    loss, is_clipped, gradient = ppo(torch.ones(2), torch.tensor([1.0, -1.0]), low=0.0, high=0.0, c=1.0)
    assert loss.tolist() == [-1.0, 1.0]
    assert not is_clipped.any()
    assert gradient[0].item() == -1.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_a_ratio_beyond_float_is_bounded_and_teaches_nothing(log_ratio: float, advantage: float) -> None:
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    loss, _ = ppo_clip(make_tokens(logprobs, torch.zeros(1), [advantage]), AlgorithmConfig())
    loss.sum().backward()
    expected = {(1000.0, 1.0): -1.28, (1000.0, -1.0): 3.0, (-1000.0, 1.0): -math.exp(-20), (-1000.0, -1.0): 0.8}
    assert loss.item() == pytest.approx(expected[log_ratio, advantage])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0]


@pytest.mark.parametrize("broken", ["logprobs", "advantages"])
def test_nan_is_not_hidden_by_a_clip(broken: str) -> None:
    nan, one = torch.tensor([math.nan]), torch.tensor([-1.0])
    logprobs, advantages = (nan, one) if broken == "logprobs" else (one, nan)
    loss, _ = ppo_clip(make_tokens(logprobs, one, advantages), AlgorithmConfig())
    assert loss.isnan().all()
