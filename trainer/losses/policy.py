"""Policy losses, per token. The caller sums them with the weight that the aggregation gives each token.

Every loss takes (tokens, algorithm), algorithm being the config section, and returns its loss [T] and whether the
token's clip was active [T]. pi is the policy that learns, pi_old the proximal policy, A the advantage,
ratio = pi / pi_old, and sg() stops the gradient. Losses of whole trajectories are in sequence_loss.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig

LOG_RATIO_LIMIT = 20.0
"""exp(20) is far beyond any clip; the limit only keeps ratios finite."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTokens:
    """The loss tokens of a micro-batch, [T] each. It has trajectories as a whole; only `logprobs` has a gradient."""

    logprobs: Tensor
    """log pi."""
    old_logprobs: Tensor
    """log pi_old, of the proximal policy."""
    rollout_logprobs: Tensor
    """log mu, of the policy that sampled the token."""
    advantages: Tensor
    trajectories: Tensor
    """int64, 0 .. num_trajectories - 1: which trajectory the token belongs to."""
    num_trajectories: int
    staleness: Tensor
    """int64: optimizer steps between the weights that sampled the token and those it trains."""
    selected: Tensor
    """bool: tokens whose covariance stands out in the step (clip_cov and kl_cov; false for every other loss)."""

    @property
    def log_ratio(self) -> Tensor:
        """log pi / pi_old, within +-20."""
        return (self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


PolicyLoss = Callable[[LossTokens, AlgorithmConfig], tuple[Tensor, Tensor]]


def ppo_clip(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate with asymmetric clip (DAPO, arXiv:2503.14476) and dual clip (arXiv:1912.09729).

    L = max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)), and for A < 0 at most -A clip_ratio_c.
    """
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    loss = unclipped.maximum(clipped)
    return loss.where(advantages >= 0, loss.minimum(-advantages * algorithm.clip_ratio_c)), clipped > unclipped


def cispo(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv:2506.13585): the ratio is clipped, the gradient of a token never.

    L = -sg(clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)) A log pi
    """
    ratio = tokens.log_ratio.exp().detach()
    clipped = ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    return -clipped * tokens.advantages * tokens.logprobs, clipped != ratio


def sapo(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """SAPO (arXiv:2511.20347): a soft gate instead of a clip, with tau by the sign of the advantage.

    L = -A (4 / tau) sigmoid(tau (ratio - 1)); at ratio = 1 its gradient is -A, as without a gate.
    """
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    tau = torch.full_like(ratio, algorithm.sapo_tau_negative).masked_fill(advantages > 0, algorithm.sapo_tau_positive)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), _none(tokens)


def dppo_tv(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """DPPO with the binary total variation (arXiv:2602.04879): the change in probability is bounded, not the ratio.

    L = -A sg(min(ratio, clip_ratio_c)) log pi, and 0 where pi - pi_old is above clip_ratio_high (A > 0) or below
    -clip_ratio_low (A <= 0).
    """
    change = (tokens.logprobs.exp() - tokens.old_logprobs.exp()).detach()
    is_held = torch.where(tokens.advantages > 0, change > algorithm.clip_ratio_high, change < -algorithm.clip_ratio_low)
    return _divergence_bounded(tokens, algorithm.clip_ratio_c, is_held)


def dppo_kl(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """DPPO with the binary KL (arXiv:2602.04879), KL(Bernoulli(pi_old) || Bernoulli(pi)).

    L = -A sg(min(ratio, clip_ratio_c)) log pi, and 0 where that KL is above clip_ratio_high and pi > pi_old (A > 0), or
    above clip_ratio_low and pi < pi_old (A <= 0).
    """
    new, old = tokens.logprobs.detach().exp(), tokens.old_logprobs.exp()
    others = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    divergence = old * (tokens.old_logprobs - tokens.logprobs.detach()) + (1 - old) * others
    is_held = torch.where(
        tokens.advantages > 0,
        (divergence > algorithm.clip_ratio_high) & (new > old),
        (divergence > algorithm.clip_ratio_low) & (new < old),
    )
    return _divergence_bounded(tokens, algorithm.clip_ratio_c, is_held)


def reinforce(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """REINFORCE (Williams, 1992): L = -A log pi. What is off-policy is left to algorithm.correction."""
    return -tokens.advantages * tokens.logprobs, _none(tokens)


def clip_cov(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Clip-Cov (arXiv:2505.22617): ppo_clip without the tokens that `covariance.clip_cov_tokens` selects."""
    loss, is_clipped = ppo_clip(tokens, algorithm)
    return loss.masked_fill(tokens.selected, 0), is_clipped | tokens.selected


def kl_cov(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """KL-Cov (arXiv:2505.22617): L = -A ratio, plus kl_cov_coef |log ratio| for the tokens that
    `covariance.kl_cov_tokens` selects."""
    log_ratio = tokens.log_ratio
    loss = -tokens.advantages * log_ratio.exp()
    return loss + algorithm.kl_cov_coef * log_ratio.abs() * tokens.selected, _none(tokens)


def _divergence_bounded(tokens: LossTokens, cap: float, is_held: Tensor) -> tuple[Tensor, Tensor]:
    weight = tokens.log_ratio.exp().clamp(max=cap).detach()
    return (-tokens.advantages * weight * tokens.logprobs).masked_fill(is_held, 0), is_held


def _none(tokens: LossTokens) -> Tensor:
    return torch.zeros_like(tokens.logprobs, dtype=torch.bool)
