"""The loss tokens of one optimizer step, flat, with all that the loss reads of them.

Whatever depends on the whole step (advantages, the weight of every token in the loss, covariances) is computed here on
the driver, over all its tokens. A micro-batch only takes its share, so no split over micro-batches or ranks can change
the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from configs.algorithm import LossAggregation
from rollout.types import BoolArray, FloatArray, IntArray, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSignals:
    """[T] each, in the order of groups, trajectories and tokens; or a micro-batch's share of them."""

    targets: IntArray
    """The sampled tokens."""
    trajectories: IntArray
    """The same number for all tokens of a trajectory: its place in the step; in a micro-batch, 0 .. K - 1."""
    staleness: IntArray
    """Optimizer steps between the weights that sampled the token and those it trains."""
    rollout_logprobs: FloatArray
    """log mu, of the policy that sampled."""
    advantages: FloatArray
    loss_weights: FloatArray
    """What the token's loss counts: the step's loss is the sum of weight times loss (`aggregation_weights`)."""
    selected: BoolArray | None = None
    """clip_cov and kl_cov: the tokens whose covariance stands out."""
    reference_logprobs: FloatArray | None = None
    """log pi_ref, where there is a reference policy."""
    values: FloatArray | None = None
    """The critic's before the step, where there is one."""
    returns: FloatArray | None = None
    """What the critic learns."""

    def take(self, index: NDArray[np.integer]) -> Self:
        """The tokens at `index`."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: array[index] for name, array in arrays.items() if array is not None})


def sampled_tokens(groups: Sequence[TrajectoryGroup], global_steps: int) -> TokenSignals:
    """What the rollouts say of the tokens of optimizer step `global_steps`: advantages and weights are still 0."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    masks = [trajectory.loss_mask for trajectory in trajectories]
    versions = [t.token_versions()[mask] for t, mask in zip(trajectories, masks, strict=True)]
    targets = join([t.response_ids[mask] for t, mask in zip(trajectories, masks, strict=True)], np.int32)
    return TokenSignals(
        targets=targets,
        trajectories=np.repeat(np.arange(len(trajectories), dtype=np.int32), [int(mask.sum()) for mask in masks]),
        staleness=global_steps - join(versions, np.int32),
        rollout_logprobs=join([t.rollout_logprobs[m] for t, m in zip(trajectories, masks, strict=True)], np.float32),
        advantages=np.zeros(len(targets), np.float32),
        loss_weights=np.zeros(len(targets), np.float32),
    )


def aggregation_weights(trajectories: IntArray, aggregation: LossAggregation, horizon: int) -> FloatArray:
    """[T] -> [T]: the weights that make the sum over tokens the mean (or sum) that `aggregation` names.

    N tokens; B trajectories that have a token; n tokens in the token's own trajectory:
        token_mean               1 / N           DAPO, arXiv:2503.14476, eq. 8
        token_sum                1
        seq_mean_token_sum       1 / B
        seq_mean_token_mean      1 / (B n)       GRPO, arXiv:2402.03300, eq. 3
        seq_mean_token_sum_norm  1 / (B horizon) Dr. GRPO, arXiv:2503.20783
    N and B count every trajectory of the step, also those that are left out for having no gradient.
    """
    lengths = np.bincount(trajectories)
    num_trajectories = max(1, np.count_nonzero(lengths))
    own = lengths[trajectories]
    divisor = {
        LossAggregation.token_mean: np.full(len(trajectories), len(trajectories)),
        LossAggregation.token_sum: np.ones(len(trajectories)),
        LossAggregation.seq_mean_token_sum: np.full(len(trajectories), num_trajectories),
        LossAggregation.seq_mean_token_mean: num_trajectories * own,
        LossAggregation.seq_mean_token_sum_norm: np.full(len(trajectories), num_trajectories * horizon),
    }[aggregation]
    return (1 / divisor).astype(np.float32)


def join(arrays: Sequence[NDArray], dtype: type) -> NDArray:
    """Concatenated; of nothing, an empty array."""
    return np.concatenate(arrays).astype(dtype) if len(arrays) else np.empty(0, dtype)
