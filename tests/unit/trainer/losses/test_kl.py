"""Estimators of the KL: golden numbers, gradients, and their expectation."""

import math

import pytest
import torch

from configs.algorithm import KLEstimator
from trainer.losses.kl import kl_estimate


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        (KLEstimator.k1, [0.5, 0.0, -1.0], [1, 1, 1]),
        (KLEstimator.k2, [0.125, 0.0, 0.5], [0.5, 0, -1]),
        (KLEstimator.k3, [math.exp(-0.5) - 0.5, 0.0, math.e - 2], [1 - math.exp(-0.5), 0, 1 - math.e]),
    ],
)
def test_by_hand(estimator: KLEstimator, values: list[float], gradients: list[float]) -> None:
    """d = log pi - log pi_ref = 0.5, 0, -1."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -2.0, -2.0], dtype=torch.float64)
    found = kl_estimate(logprobs, reference, estimator)
    found.sum().backward()
    assert found.tolist() == pytest.approx(values)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradients)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator), logprobs)


def test_k3_is_bounded_and_stops_learning_there() -> None:
    logprobs = torch.tensor([-4.0, -90.0, 90.0], requires_grad=True)  # exp(4) - 5 = 49.6, exp(20) - 21, 20 - 1
    found = kl_estimate(logprobs, torch.zeros(3), KLEstimator.k3)
    found.sum().backward()
    assert found.tolist() == [10, 10, 10]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("estimator", [KLEstimator.k1, KLEstimator.k3])
def test_the_mean_under_the_policy_is_the_kl(estimator: KLEstimator) -> None:
    pi, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    expected = (pi * (pi / reference).log()).sum()
    mean = (pi * kl_estimate(pi.log(), reference.log(), estimator)).sum()
    torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize("estimator", [KLEstimator.k1, KLEstimator.k2])
def test_the_mean_gradient_on_policy(estimator: KLEstimator) -> None:
    """That of k2 is the KL's own; that of k1 is 0, and so it is refused as a loss."""
    logits = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    (own,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    weighted = (logprobs.detach().exp() * kl_estimate(logprobs, reference, estimator)).sum()
    (mean,) = torch.autograd.grad(weighted, logits)
    torch.testing.assert_close(mean, own if estimator is KLEstimator.k2 else torch.zeros_like(own))
