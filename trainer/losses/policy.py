"""Policy losses, each as formula, paper and a few lines.

Every loss takes (tokens, algorithm), algorithm being the config section, and returns two tensors [T]: the loss of each
token, and whether the token's clip was active. `objective.py` multiplies the losses by the tokens' weights and adds
them up.

Notation: pi is the policy that learns, pi_old the proximal policy, mu the policy that sampled, A the advantage,
ratio = pi / pi_old. sg() stops the gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig

LOG_RATIO_LIMIT = 20.0
"""The limit of log ratios. exp(20) is far beyond any clip: the limit only keeps ratios finite."""
GSPO_LIMIT = 10.0
"""Largest log ratio of a sequence in gspo, as in verl and SkyRL."""
SAPO_TAU_POSITIVE, SAPO_TAU_NEGATIVE = 1.0, 1.05
"""Temperatures of sapo's gate by the sign of the advantage, those of the paper. A little above 1 for bad tokens makes
their gradient fade sooner, which is what keeps the training stable."""

VESPO_K, VESPO_LAMBDA = (2.0, 3.0), (3.0, 2.0)
"""Power and decay of vespo's weight, for good tokens and for bad ones: the paper's, as in its code and in TRL."""
VESPO_LOWEST = math.log(1e-8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTokens:
    """The loss tokens of a micro-batch, [T] each. A micro-batch never splits a sequence. Only `logprobs` has a
    gradient."""

    logprobs: Tensor
    """The token's log pi."""
    old_logprobs: Tensor
    """The token's log pi_old."""
    rollout_logprobs: Tensor
    """The token's log mu."""
    advantages: Tensor
    sequences: Tensor
    """The sequence that each token belongs to: int64, 0 .. num_sequences - 1."""
    num_sequences: int
    staleness: Tensor
    """The versions between the weights that sampled the token and those that it trains, int64."""
    selected: Tensor
    """The mask of tokens that stand out in the step (clip_cov, kl_cov and m2po; false for every other loss)."""

    @property
    def exact_log_ratio(self) -> Tensor:
        """Return log pi / pi_old."""
        return self.logprobs - self.old_logprobs

    @property
    def log_ratio(self) -> Tensor:
        """Return log pi / pi_old, within +-20."""
        return self.exact_log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


PolicyLoss = Callable[[LossTokens, AlgorithmConfig], tuple[Tensor, Tensor]]

# -- losses of single tokens -------------------------------------------------------------------------------------------


def ppo_clip(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate with asymmetric clip (DAPO, arXiv:2503.14476) and dual clip (arXiv:1912.09729).

    L = max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)), and for A < 0 at most -A clip_ratio_c.
    """
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    loss, most = unclipped.maximum(clipped), -advantages * algorithm.clip_ratio_c
    is_clipped = (clipped > unclipped) | ((advantages < 0) & (loss > most))
    return loss.where(advantages >= 0, loss.minimum(most)), is_clipped


def cispo(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv:2506.13585): the ratio is clipped, the gradient of a token never.

    L = -sg(clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)) A log pi
    """
    ratio = tokens.log_ratio.exp().detach()
    clipped = ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    return -clipped * tokens.advantages * tokens.logprobs, clipped != ratio


def sapo(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """SAPO (arXiv:2511.20347): a soft gate instead of a clip, with tau chosen by the sign of the advantage.

    L = -A (4 / tau) sigmoid(tau (ratio - 1)); at ratio = 1 its gradient is -A, as without a gate.
    """
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    tau = torch.full_like(ratio, SAPO_TAU_NEGATIVE).masked_fill(advantages > 0, SAPO_TAU_POSITIVE)
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
    other_tokens = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    divergence = old * (tokens.old_logprobs - tokens.logprobs.detach()) + (1 - old) * other_tokens
    is_held = torch.where(
        tokens.advantages > 0,
        (divergence > algorithm.clip_ratio_high) & (new > old),
        (divergence > algorithm.clip_ratio_low) & (new < old),
    )
    return _divergence_bounded(tokens, algorithm.clip_ratio_c, is_held)


def reinforce(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """REINFORCE (Williams, 1992): L = -A log pi. algorithm.correction alone corrects for off-policy tokens."""
    return -tokens.advantages * tokens.logprobs, _none(tokens)


def clip_cov(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Clip-Cov (arXiv:2505.22617): ppo_clip without the tokens that `select_tokens` selects."""
    loss, is_clipped = ppo_clip(tokens, algorithm)
    return loss.masked_fill(tokens.selected, 0), is_clipped | tokens.selected


def kl_cov(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """KL-Cov (arXiv:2505.22617): L = -A ratio, plus kl_cov_coef |log ratio| for selected tokens."""
    log_ratio = tokens.log_ratio
    loss = -tokens.advantages * log_ratio.exp()
    return loss + algorithm.kl_cov_coef * log_ratio.abs() * tokens.selected, _none(tokens)


def m2po(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """M2PO (arXiv:2510.01161): L = -A ratio, and 0 for tokens that `m2po_outliers` selects. A limit on the second
    moment of the whole batch, in place of a clip of each token, leaves out few tokens however stale they are."""
    return (-tokens.advantages * tokens.log_ratio.exp()).masked_fill(tokens.selected, 0), tokens.selected


# -- losses of whole sequences, one value for each of their tokens -----------------------------------------------------


def gspo(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """GSPO (arXiv:2507.18071, in its token form): one ratio for a sequence, s = exp(mean log ratio).

    L = max(-A s', -A clip(s', 1 - clip_ratio_low, 1 + clip_ratio_high)) with s' = sg(s) pi / sg(pi), whose value is s
    for every token and whose gradient is s times that of the token's log pi. log s' is at most 10, beyond which it has
    no gradient. The paper's clip is 3e-4 and 4e-4.
    """
    logprobs = tokens.logprobs
    log_sequence_ratio = _sequence_means(tokens.exact_log_ratio.detach(), tokens)
    ratio = (log_sequence_ratio + logprobs - logprobs.detach()).clamp(max=GSPO_LIMIT).exp()
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    return unclipped.maximum(clipped), clipped > unclipped


def gmpo(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """GMPO (arXiv:2507.20673), verl's geo_mean: a sequence's geometric mean of token-wise clipped ratios.

    L = -A exp(mean of l) for all tokens of a sequence, l being the log ratio, clipped to at most clip_ratio_high
    where A > 0 and to at least -clip_ratio_low where A < 0, and A the sequence's mean advantage. The paper clips at
    0.4. The mean is within +-20, only to stay finite. A correction's weights are made one for a sequence, too
    (`sequence_weights`).
    """
    log_ratio, sign = tokens.exact_log_ratio, tokens.advantages.sign()
    clipped = log_ratio.clamp(-algorithm.clip_ratio_low, algorithm.clip_ratio_high)
    is_clipped = sign * clipped < sign * log_ratio
    log_mean = _sequence_means(torch.where(is_clipped, clipped, log_ratio), tokens)
    ratio = log_mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return -_sequence_means(tokens.advantages, tokens) * ratio, is_clipped


def luspo(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """LUSPO (arXiv:2602.05261): gspo, with the loss of a sequence multiplied by its length.

    That is gspo's loss of a token, added up over the tokens of a trajectory and not averaged: its aggregation is
    seq_mean_token_sum, and the clip is gspo's.
    """
    return gspo(tokens, algorithm)


def vespo(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """VESPO (arXiv:2602.10693): a gamma-shaped weight of the whole sequence's ratio, in place of a clip.

    L = -A sg(phi(W)) log pi with phi(W) = W^k exp(lambda (1 - W)) and W = product of pi / mu over the sequence, within
    [1e-8, exp(20)]; k = 2 and lambda = 3 where A >= 0, else 3 and 2. phi is 1 at W = 1 and 0 far from it. W covers the
    whole way from mu, whatever pi_old, so that no correction's weights are left to apply.
    """
    log_ratio = (tokens.logprobs.detach() - tokens.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_product = sums(log_ratio, tokens.sequences, tokens.num_sequences)
    log_product = log_product.clamp(VESPO_LOWEST, LOG_RATIO_LIMIT)[tokens.sequences]
    is_good = tokens.advantages >= 0
    k, decay = (torch.where(is_good, *pair) for pair in (VESPO_K, VESPO_LAMBDA))
    phi = (k * log_product - decay * log_product.expm1()).exp()
    return -tokens.advantages * phi * tokens.logprobs, _none(tokens)


# -- reductions over the tokens of each sequence: [T] values, [T] sequence numbers 0 .. K - 1 -> [K] -------------------


def sums(values: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    return values.new_zeros(num_sequences).index_add(0, sequences, values)


def means(values: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """Return the mean of each sequence, which must have a token."""
    counts = sums(torch.ones_like(values), sequences, num_sequences)
    return sums(values, sequences, num_sequences) / counts


def _sequence_means(values: Tensor, tokens: LossTokens) -> Tensor:
    """[T] -> [T]: the mean over the token's sequence."""
    return means(values, tokens.sequences, tokens.num_sequences)[tokens.sequences]


def _divergence_bounded(tokens: LossTokens, cap: float, is_held: Tensor) -> tuple[Tensor, Tensor]:
    weight = tokens.log_ratio.exp().clamp(max=cap).detach()
    return (-tokens.advantages * weight * tokens.logprobs).masked_fill(is_held, 0), is_held


def _none(tokens: LossTokens) -> Tensor:
    return torch.zeros_like(tokens.logprobs, dtype=torch.bool)
