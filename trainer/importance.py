"""Off-policy corrections: the tokens were sampled by older weights than those that learn from them.

Three policies: mu sampled the token (`rollout_logprobs`), pi_old is the proximal policy the clipped ratio is taken
against (`old_logprobs`), pi is the one being optimised (`logprobs`).
"""

from torch import Tensor

from configs.algorithm import Proximal


def proximal_logprobs(logprobs: Tensor, rollout_logprobs: Tensor, proximal: Proximal) -> Tensor:
    """[T] log pi_old. `rollout`: mu itself. `current`: the policy before this step, which with one optimizer step per
    batch is the forward pass at hand (decoupled PPO, arXiv:2505.24298)."""
    return rollout_logprobs if proximal is Proximal.rollout else logprobs.detach()


def truncated_importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """[T] min(pi_old / mu, cap), without gradient (token-level truncated importance sampling)."""
    return (old_logprobs - rollout_logprobs).exp().clamp(max=cap).detach()


def effective_sample_size(log_ratio: Tensor) -> Tensor:
    """Scalar in (0, 1]: (sum w)^2 / (T sum w^2) for w = exp(log_ratio), the share of tokens that effectively count."""
    weights = (log_ratio - log_ratio.max()).exp()  # its scale cancels; unshifted, the squares overflow
    return weights.sum().square() / (weights.square().sum() * weights.numel())
