"""The objective of an optimizer step: policy loss, off-policy correction, entropy bonus, KL to the reference, and the
cross-entropy of demonstrations."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.algorithm import LOSS_PARAMETERS, LOSSES, KLEstimator
from configs.runtime.dotted import find
from configs.schema import AlgorithmConfig
from trainer.batch import MicroBatch
from trainer.losses.importance import (
    gap_metrics,
    importance_weights,
    is_kept,
    proximal_logprobs,
    rejections,
    resolve,
    sequence_weights,
    version_metrics,
)
from trainer.losses.policy import LOG_RATIO_LIMIT, LossTokens, PolicyLoss, sums
from trainer.metrics import Mean, Metric, Sum
from trainer.tokens import TokenSignals

LARGEST_K3 = 10.0


class Share(NamedTuple):
    """A micro-batch's share of the objective."""

    loss: Tensor
    metrics: dict[str, Metric]
    is_clipped: Tensor
    """[T] bool: the clip of the policy loss was active."""
    is_kept: Tensor
    """[T] bool: the token is not rejected and its importance weight is not 0."""


class Objective:
    """Sum of components, each over the tokens of a mini-batch that have a weight in it:

        rl       loss_weight * (w * kept * L - entropy_coef * H + kl_rollout_coef * (log pi / mu)^2)
        ref_kl   loss_weight * kl_loss_coef * KL(pi || pi_ref)
        ce       ce_weight * ce_coef * -log pi

    The weights of a component sum to 1 over an optimizer step, or to what its aggregation says, however many tokens
    have a weight in another. Tokens that the policy sampled have a loss_weight: rl and ref_kl are estimated from them.
    L is the policy loss, w the importance weight, and `kept` is 0 where the token is rejected. Both apply to the policy
    loss only: entropy and both KLs are of all sampled tokens. The squared log ratio to mu is Kimi K2.5's
    (arXiv:2602.02276). A rejected token still counts in the means of loss_weight.
    Tokens of demonstrations, which nobody sampled, have a ce_weight.

    Example:
        objective = Objective(config.algorithm)
        logprobs, entropy = policy(micro_batch)
        share = objective(logprobs, entropy, micro_batch)
        share.loss.backward()
    """

    def __init__(self, algorithm: AlgorithmConfig):
        self._algorithm = algorithm
        self._weights = resolve(algorithm).weights
        self._rejections = rejections(algorithm)
        self._policy_loss = load_policy_loss(algorithm.loss)

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: MicroBatch, before: Tensor | None = None) -> Share:
        """Return the micro-batch's share of the objective. `logprobs` and `entropy` are [T].

        Args:
            before: [T] log pi before the first optimizer step of the batch; None: this is the first.
        """
        tokens = batch.tokens
        if tokens.ce_weights is None:
            return self._of_sampled(logprobs, entropy, tokens, before)
        ce_weights = _as_tensor(tokens.ce_weights, logprobs)
        ce_loss = -(ce_weights * logprobs).sum()
        total = self._algorithm.ce_coef * ce_loss
        is_learned = ce_weights != 0
        count = float(is_learned.sum())
        metrics: dict[str, Metric] = {
            "actor/ce_loss": Mean(-logprobs.detach().where(is_learned, 0.0).double().sum().item(), count),
            "actor/ce_tokens": Sum(count),
        }
        is_clipped = torch.zeros_like(logprobs, dtype=torch.bool)
        is_kept = torch.ones_like(is_clipped)
        is_sampled = tokens.loss_weights != 0
        if is_sampled.any():
            index = torch.as_tensor(is_sampled, device=logprobs.device)
            sampled_tokens = tokens.take(is_sampled.nonzero()[0]).renumbered()
            share = self._of_sampled(
                logprobs[index], entropy[index], sampled_tokens, None if before is None else before[index]
            )
            total, metrics = total + share.loss, metrics | share.metrics
            is_clipped[index], is_kept[index] = share.is_clipped, share.is_kept
        return Share(total, metrics, is_clipped, is_kept)

    def _of_sampled(self, logprobs: Tensor, entropy: Tensor, signals: TokenSignals, before: Tensor | None) -> Share:
        """Return the share of the components rl and ref_kl. All tokens were sampled."""
        algorithm = self._algorithm
        tokens = loss_tokens(logprobs, signals, algorithm, before)
        loss_weights = _as_tensor(signals.loss_weights, logprobs)
        losses, is_clipped = self._policy_loss(tokens, algorithm)
        weights = importance_weights(tokens, self._weights, algorithm)
        if algorithm.loss == "gmpo":
            weights = sequence_weights(weights, tokens)
        kept = torch.ones_like(is_clipped)
        for rejection in self._rejections:
            kept &= is_kept(tokens, rejection)
        policy_loss = (losses * weights * kept * loss_weights).sum()
        total = policy_loss
        metrics: dict[str, Metric] = {"actor/pg_loss": Sum(policy_loss.item())}
        if algorithm.entropy_coef:
            total = total - algorithm.entropy_coef * (entropy * loss_weights).sum()
        if algorithm.kl_rollout_coef:
            kl_rollout = ((tokens.logprobs - tokens.rollout_logprobs).square() * loss_weights).sum()
            total = total + algorithm.kl_rollout_coef * kl_rollout
            metrics |= {"actor/kl_rollout_loss": Sum(kl_rollout.item())}
        if algorithm.kl_loss_coef:
            assert signals.reference_logprobs is not None
            reference_logprobs = _as_tensor(signals.reference_logprobs, logprobs)
            divergence = kl_estimate(logprobs, reference_logprobs, algorithm.kl_loss_estimator)
            if algorithm.kl_loss_unbiased:
                divergence = divergence * bounded_ratio(tokens)
            kl_loss = (divergence * loss_weights).sum()
            total = total + algorithm.kl_loss_coef * kl_loss
            metrics |= {"actor/kl_loss": Sum(kl_loss.item())}
        if tokens.num_sequences:
            metrics |= _token_means(tokens, is_clipped, entropy, weights)
            metrics |= gap_metrics(tokens, algorithm.importance_cap)
            if algorithm.needs_old_versions:
                metrics |= version_metrics(tokens, logprobs if before is None else before)
            if self._rejections:
                metrics |= _rejected(tokens, kept)
        return Share(total, metrics, is_clipped, kept & (weights != 0))


def load_policy_loss(loss: str) -> PolicyLoss:
    """Return the function that `algorithm.loss` names.

    Raises:
        ValueError: the name is neither built in nor `package.module:function` taking (tokens, algorithm).
    """
    function = find("algorithm.loss", f"trainer.losses.policy:{loss}" if loss in LOSSES else loss, LOSS_PARAMETERS)
    if loss in LOSSES:
        return function

    def checked(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
        returned, shape = function(tokens, algorithm), list(tokens.logprobs.shape)
        if _shapes(returned) != [shape, shape]:
            expected = f"(loss, is_clipped), two tensors of shape {shape}"
            raise TypeError(f"algorithm.loss={loss}: must return {expected}, but returned {_shapes(returned)}")
        return returned

    return checked


def loss_tokens(
    logprobs: Tensor, tokens: TokenSignals, algorithm: AlgorithmConfig, before: Tensor | None = None
) -> LossTokens:
    """Return a micro-batch's sampled tokens as tensors on the device of `logprobs`. `before`: see `Objective`."""
    device = logprobs.device
    rollout_logprobs = _as_tensor(tokens.rollout_logprobs, logprobs)
    scored = None if tokens.old_logprobs is None else _as_tensor(tokens.old_logprobs, logprobs)
    steps_behind = torch.as_tensor(tokens.steps_behind, device=device)
    selected = torch.zeros_like(steps_behind) if tokens.selected is None else torch.as_tensor(tokens.selected)
    return LossTokens(
        logprobs=logprobs,
        old_logprobs=proximal_logprobs(
            logprobs if before is None else before, rollout_logprobs, steps_behind, algorithm.proximal, scored
        ),
        rollout_logprobs=rollout_logprobs,
        advantages=_as_tensor(tokens.advantages, logprobs),
        sequences=torch.as_tensor(tokens.sequences, dtype=torch.int64, device=device),
        num_sequences=tokens.num_sequences,
        staleness=torch.as_tensor(tokens.staleness, device=device),
        selected=selected.to(device, torch.bool),
    )


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(pi || pi_ref) from the sampled tokens alone, [T] (J. Schulman,
    http://joschu.net/blog/kl-approx.html).

    With d = log pi - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. For k3, d is clamped to +-20 and the
    estimate to at most 10, beyond which it has no gradient (verl's low_var_kl).
    """
    difference = logprobs - reference_logprobs
    match estimator:
        case KLEstimator.k1:
            return difference
        case KLEstimator.k2:
            return difference.square() / 2
        case KLEstimator.k3:
            difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return ((-difference).exp() - 1 + difference).clamp(max=LARGEST_K3)


def bounded_ratio(tokens: LossTokens) -> Tensor:
    """[T] pi / mu with its gradient, which turns an estimate over pi's samples into one over mu's (DeepSeek-V3.2,
    arXiv:2512.02556)."""
    return (tokens.logprobs - tokens.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _token_means(tokens: LossTokens, is_clipped: Tensor, entropy: Tensor, weights: Tensor) -> dict[str, Metric]:
    log_ratio = tokens.old_logprobs - tokens.logprobs.detach()
    values = torch.stack([is_clipped.to(weights.dtype), log_ratio, entropy.detach(), weights])
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy", "actor/importance_weight")
    return {name: Mean(total, values.shape[1]) for name, total in zip(names, values.sum(1).tolist(), strict=True)}


def _rejected(tokens: LossTokens, kept: Tensor) -> dict[str, Metric]:
    rejected = (~kept).double()
    sequences = sums(rejected, tokens.sequences, tokens.num_sequences) > 0
    return {
        "correction/rejected_fraction": Mean(rejected.sum().item(), len(kept)),
        "correction/rejected_sequences": Mean(sequences.sum().item(), tokens.num_sequences),
    }


def _as_tensor(array: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(array, dtype=like.dtype, device=like.device)


def _shapes(returned: Any) -> list[Any]:
    """Return the shape of each tensor, and the type of anything else."""
    parts = returned if isinstance(returned, tuple) else (returned,)
    return [list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
