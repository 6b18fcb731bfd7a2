"""Off-policy corrections: older weights sampled the tokens than those that learn from them.

Three policies: mu sampled the token (`rollout_logprobs`), pi_old is the proximal policy against which the loss takes
its ratio (`old_logprobs`), pi is the one being optimised (`logprobs`). The loss corrects from pi_old to pi, the
importance weights w = pi_old / mu correct the rest, and rejection looks at the whole gap, r = pi / mu. Nothing here has
a gradient. In the first optimizer step on a batch, proximal=current makes w = r.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from configs.algorithm import CORRECTIONS, Correction, CorrectionSpec, Proximal, Weights
from configs.schema import AlgorithmConfig
from trainer.losses.policy import LOG_RATIO_LIMIT, LossTokens, maxima, means, sums
from trainer.metrics import EffectiveSampleSize, Max, Mean, Metric


def proximal_logprobs(before: Tensor, rollout_logprobs: Tensor, steps_behind: Tensor, proximal: Proximal) -> Tensor:
    """[T] log pi_old, the same in all optimizer steps on a batch.

    rollout: mu itself. current: the policy before the first optimizer step on the batch (decoupled PPO,
    arXiv:2505.24298). interpolated: the policy one step before that one, assumed on the log-linear path from mu, d
    steps behind, to it: log mu + (d - 1) / d (log pi - log mu), and mu for d = 0 (A-3PO, arXiv:2512.06547). d
    counts steps and not versions: a version lasts weight_sync.interval of them.

    Args:
        before: [T] log pi before the first optimizer step on the batch; in that step, the forward pass at hand.
    """
    current = before.detach()
    if proximal is Proximal.rollout:
        return rollout_logprobs
    if proximal is Proximal.current:
        return current
    steps = steps_behind.to(current.dtype).clamp(min=1)
    return rollout_logprobs + (steps - 1) / steps * (current - rollout_logprobs)


def resolve(algorithm: AlgorithmConfig) -> CorrectionSpec:
    """Return the config's correction: that of the preset, where algorithm.rejection* replaces its rejection."""
    correction = algorithm.correction
    if correction is Correction.auto:
        correction = Correction.none if algorithm.proximal is Proximal.rollout else Correction.token_is
    spec = CORRECTIONS[correction]
    if algorithm.rejection is not None:
        spec = CorrectionSpec(spec.weights, algorithm.rejection)
    return replace(
        spec,
        low=spec.low if algorithm.rejection_low is None else algorithm.rejection_low,
        high=spec.high if algorithm.rejection_high is None else algorithm.rejection_high,
    )


def importance_weights(tokens: LossTokens, weights: Weights, algorithm: AlgorithmConfig) -> Tensor:
    """[T] the importance weights, from w = pi_old / mu.

    token: min(w, importance_cap), truncated importance sampling (Ionides, 2008). sequence: min(product of w over the
    trajectory, importance_cap) for each of its tokens. icepop: w, and 0 outside [icepop_low, icepop_high]
    (arXiv:2510.18855).
    """
    log_weights = tokens.old_logprobs - tokens.rollout_logprobs
    match weights:
        case Weights.none:
            return torch.ones_like(log_weights)
        case Weights.token:
            return _ratio(log_weights).clamp(max=algorithm.importance_cap)
        case Weights.sequence:
            log_product = sums(log_weights, tokens.sequences, tokens.num_sequences)
            return _ratio(log_product).clamp(max=algorithm.importance_cap)[tokens.sequences]
        case Weights.icepop:
            ratio = _ratio(log_weights)
            return ratio.where((ratio >= algorithm.icepop_low) & (ratio <= algorithm.icepop_high), 0)


def sequence_weights(weights: Tensor, tokens: LossTokens) -> Tensor:
    """[T] -> [T]: each sequence's geometric mean of its tokens' weights, as verl weighs the loss of gmpo. 1e-10 is
    added to a weight, so that one of 0 (icepop) leaves something of the others."""
    return means((weights + 1e-10).log(), tokens.sequences, tokens.num_sequences).exp()[tokens.sequences]


def is_kept(tokens: LossTokens, spec: CorrectionSpec) -> Tensor:
    """[T] bool: the tokens that are not rejected, by r = pi / mu (http://joschu.net/blog/kl-approx.html).

    k1 = log r is kept within [log low, log high] (of a mean: the geometric mean of r within [low, high]),
    k2 = (log r)^2 / 2 and k3 = r - 1 - log r up to high; per token, or per sequence by sum, mean or maximum.
    """
    log_ratio = (tokens.logprobs.detach() - tokens.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if spec.rejection is None or spec.high is None:
        return torch.ones_like(log_ratio, dtype=torch.bool)
    level, _, estimator = spec.rejection.value.rpartition("_")
    values = {"k1": log_ratio, "k2": log_ratio.square() / 2, "k3": log_ratio.expm1() - log_ratio}[estimator]
    if level != "token":
        reduce = {"seq_sum": sums, "seq_mean": means, "seq_max": maxima}[level]
        values = reduce(values, tokens.sequences, tokens.num_sequences)[tokens.sequences]
    if estimator != "k1":
        return values <= spec.high
    assert spec.low is not None, "validated with the config"
    return (values >= math.log(spec.low)) & (values <= math.log(spec.high))


def gap_metrics(tokens: LossTokens, cap: float) -> dict[str, Metric]:
    """Return how far pi is from mu, over tokens (ppl_ratio: over sequences). Names as in verl's rollout_corr."""
    log_ratio = (tokens.logprobs.detach() - tokens.rollout_logprobs).double()
    ratio = _ratio(log_ratio)
    # perplexity of pi / perplexity of mu, per sequence
    perplexity_ratio = (-means(log_ratio, tokens.sequences, tokens.num_sequences)).exp()
    k1, k3, sum_ppl, num_high, num_low, total, total_squared, largest = torch.stack(
        [
            -log_ratio.sum(),
            (ratio - 1 - log_ratio).sum(),
            perplexity_ratio.sum(),
            (ratio > cap).double().sum(),
            (ratio < 1 / cap).double().sum(),
            ratio.sum(),
            ratio.square().sum(),
            log_ratio.abs().max(),
        ]
    ).tolist()
    num_tokens = len(log_ratio)
    return {
        "actor/rollout_kl": Mean(k1, num_tokens),
        "actor/rollout_logprob_diff_max": Max(largest),
        "actor/ess": EffectiveSampleSize(total, total_squared, num_tokens),
        "correction/k3_kl": Mean(k3, num_tokens),
        "correction/ppl_ratio": Mean(sum_ppl, tokens.num_sequences),
        "correction/ratio_fraction_high": Mean(num_high, num_tokens),
        "correction/ratio_fraction_low": Mean(num_low, num_tokens),
    }


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
