"""The loss of recipe=search_r1 is SkyRL's `rollout_is` under its geometric mask."""

import torch

from tests.support.compose import resolve
from tests.support.losses import float64, make_tokens
from trainer.losses.importance import importance_weights, is_kept
from trainer.losses.importance import resolve as correction_of
from trainer.losses.objective import load_policy_loss


def test_a_token_is_weighed_by_its_ratio_or_has_no_gradient() -> None:
    """The gradient is -A r for r = pi / mu in [0.8, 1.2], where the trajectory's mean of r is in [0.99, 1.01]."""
    algorithm = resolve("recipe=search_r1", "dry_run=true").algorithm
    ratios = float64([1.005, 0.999, 1.15, 1 / 1.15, 1.3, 1 / 1.3, 1.1, 1.1])
    advantages = float64([1, 1, -2, -2, 1, 1, 3, 3])
    rollout_logprobs = float64([-1.0] * 8)
    logprobs = (rollout_logprobs + ratios.log()).requires_grad_()
    before_the_step = logprobs.detach().clone()
    tokens = make_tokens(logprobs, before_the_step, advantages, lengths=[2] * 4, rollout_logprobs=rollout_logprobs)
    losses, _ = load_policy_loss(algorithm.loss)(tokens, algorithm)
    spec = correction_of(algorithm)
    (losses * importance_weights(tokens, spec.weights, algorithm) * is_kept(tokens, spec)).sum().backward()
    assert logprobs.grad is not None
    kept = float64([1, 1, 1, 1, 0, 0, 0, 0])
    torch.testing.assert_close(logprobs.grad, -advantages * ratios * kept)
