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

from configs.algorithm import (
    CORRECTIONS,
    Correction,
    CorrectionSpec,
    Proximal,
    Rejection,
    Weights,
    make_rejection,
)
from configs.schema import AlgorithmConfig
from trainer.losses.policy import LOG_RATIO_LIMIT, LossTokens, means, sums
from trainer.metrics import EffectiveSampleSize, Max, Mean, Metric


def proximal_logprobs(
    before: Tensor, rollout_logprobs: Tensor, steps_behind: Tensor, proximal: Proximal, scored: Tensor | None = None
) -> Tensor:
    """[T] log pi_old, the same in all optimizer steps on a batch.

    rollout: mu itself. current: the policy before the first optimizer step on the batch (decoupled PPO,
    arXiv:2505.24298). interpolated: the policy one step before that one, assumed on the log-linear path from mu, d
    steps behind, to it: log mu + (d - 1) / d (log pi - log mu), and mu for d = 0 (A-3PO, arXiv:2512.06547). d
    counts steps and not versions: a version lasts weight_sync.interval of them. exact: the policy that sampled the
    token, as the trainer computes it (arXiv:2605.12070).

    Args:
        before: [T] log pi before the first optimizer step on the batch; in that step, the forward pass at hand.
        scored: [T] what the versions that sampled the tokens say of them, for exact; NaN where that is `before`, None
            where it is so everywhere.
    """
    current = before.detach()
    if proximal is Proximal.rollout:
        return rollout_logprobs
    if scored is not None:
        return scored.where(~scored.isnan(), current)
    if proximal in (Proximal.current, Proximal.exact):
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


def rejections(algorithm: AlgorithmConfig) -> list[CorrectionSpec]:
    """Return every rejection that applies: that of the correction, and those of algorithm.rejections."""
    specs = (resolve(algorithm), *(make_rejection(name, bounds) for name, bounds in algorithm.rejections.items()))
    return [spec for spec in specs if spec.rejection is not None]


def importance_weights(tokens: LossTokens, weights: Weights, algorithm: AlgorithmConfig) -> Tensor:
    """[T] the importance weights, from w = pi_old / mu.

    token: min(w, importance_cap), truncated importance sampling (Ionides, 2008). sequence: min(product of w over the
    sequence, importance_cap) for each of its tokens. icepop: w, and 0 outside [icepop_low, icepop_high]
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
    k2 = (log r)^2 / 2 and k3 = r - 1 - log r up to high; per token, or per sequence by sum, mean or maximum, which
    means that each of its tokens is kept.

    opsm leaves out tokens with A < 0 in a sequence whose mean of -log r is above high (off-policy sequence masking,
    DeepSeek-V3.2, arXiv:2512.02556): what is unlikely by now is not pushed further down.
    """
    log_ratio = (tokens.logprobs.detach() - tokens.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    assert spec.rejection is not None and spec.high is not None, "validated with the config"
    if spec.rejection is Rejection.opsm:
        divergences = -means(log_ratio, tokens.sequences, tokens.num_sequences)
        return (tokens.advantages >= 0) | (divergences <= spec.high)[tokens.sequences]
    level, _, estimator = spec.rejection.value.rpartition("_")
    values = {"k1": log_ratio, "k2": log_ratio.square() / 2, "k3": log_ratio.expm1() - log_ratio}[estimator]
    if level in ("seq_sum", "seq_mean"):
        reduce = sums if level == "seq_sum" else means
        values = reduce(values, tokens.sequences, tokens.num_sequences)[tokens.sequences]
    if estimator == "k1":
        assert spec.low is not None, "validated with the config"
        kept = (values >= math.log(spec.low)) & (values <= math.log(spec.high))
    else:
        kept = values <= spec.high
    if level == "seq_max":
        kept = sums((~kept).to(values.dtype), tokens.sequences, tokens.num_sequences)[tokens.sequences] == 0
    return kept


def gap_metrics(tokens: LossTokens, cap: float) -> dict[str, Metric]:
    """Return how far pi is from mu, over tokens (ppl_ratio and sequence_ess: over sequences). Names as in verl's
    rollout_corr."""
    log_ratio = (tokens.logprobs.detach() - tokens.rollout_logprobs).double()
    ratio = _ratio(log_ratio)
    # perplexity of pi / perplexity of mu, per sequence
    perplexity_ratio = (-means(log_ratio, tokens.sequences, tokens.num_sequences)).exp()
    products = _ratio(sums(log_ratio, tokens.sequences, tokens.num_sequences))
    k1, k3, sum_ppl, num_high, num_low, total, total_squared, largest, product, product_squared = torch.stack(
        [
            -log_ratio.sum(),
            (ratio - 1 - log_ratio).sum(),
            perplexity_ratio.sum(),
            (ratio > cap).double().sum(),
            (ratio < 1 / cap).double().sum(),
            ratio.sum(),
            ratio.square().sum(),
            log_ratio.abs().max(),
            products.sum(),
            products.square().sum(),
        ]
    ).tolist()
    num_tokens = len(log_ratio)
    return {
        "actor/rollout_kl": Mean(k1, num_tokens),
        "actor/rollout_logprob_diff_max": Max(largest),
        "actor/ess": EffectiveSampleSize(total, total_squared, num_tokens),
        "actor/sequence_ess": EffectiveSampleSize(product, product_squared, tokens.num_sequences),
        "correction/k3_kl": Mean(k3, num_tokens),
        "correction/ppl_ratio": Mean(sum_ppl, tokens.num_sequences),
        "correction/ratio_fraction_high": Mean(num_high, num_tokens),
        "correction/ratio_fraction_low": Mean(num_low, num_tokens),
    }


def version_metrics(tokens: LossTokens, before: Tensor) -> dict[str, Metric]:
    """Return metrics of the two parts of the gap where pi_old is exact: engine against trainer under the same weights,
    and version against version in the trainer.

    Args:
        before: [T] log pi before the first optimizer step on the batch.
    """
    mismatch = (tokens.old_logprobs - tokens.rollout_logprobs).double()
    staleness = (before.detach() - tokens.old_logprobs).double()
    values = [-mismatch, _ratio(mismatch) - 1 - mismatch, mismatch.abs(), -staleness]
    k1, k3, absolute, stale = torch.stack([value.sum() for value in values]).tolist()
    num_tokens = len(mismatch)
    return {
        "mismatch/kl": Mean(k1, num_tokens),
        "mismatch/k3_kl": Mean(k3, num_tokens),
        "mismatch/logprob_diff_mean": Mean(absolute, num_tokens),
        "mismatch/logprob_diff_max": Max(mismatch.abs().max().item()),
        "staleness/kl": Mean(stale, num_tokens),
    }


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
