"""The loss tokens of one step as flat arrays, with all that the loss reads.

Everything that depends on the whole step (advantages, loss weights, covariances) is computed on the driver over all its
tokens. A micro-batch only takes its share, so no split over micro-batches or ranks can change the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from configs.algorithm import LossAggregation
from rollout.types import BoolArray, FloatArray, IntArray, KeptTokens, TrajectoryGroup, staleness


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSignals:
    """Arrays [T] in the order of groups, trajectories and tokens; in a micro-batch, its share of them.

    Example, trajectories [7 8] and [9] at step 6, sampled by version 5 and 6:
        targets       7 8 9
        trajectories  0 0 1
        sequences     0 0 1
        staleness     1 1 0
    """

    targets: IntArray
    """The sampled tokens."""
    trajectories: IntArray
    """Number of the token's trajectory in the step."""
    sequences: IntArray
    """Number of its sequence in the step; in a micro-batch, 0 .. K - 1. Most trajectories are one sequence."""
    staleness: IntArray
    """Versions between the weights that sampled the token and those that it trains."""
    steps_behind: IntArray
    """The same distance in steps: with weight_sync.interval=I, a version lasts I steps."""
    rollout_logprobs: FloatArray
    """The log mu of each token, by the policy that sampled."""
    advantages: FloatArray
    loss_weights: FloatArray
    """An optimizer step's loss is the sum of loss_weights * loss over its tokens (`aggregation_weights`). Above 0 for a
    token that the policy sampled, 0 for a token of a demonstration."""
    ce_weights: FloatArray | None = None
    """The weights of the cross-entropy: above 0 for a token of a demonstration. None: there is no demonstration."""
    selected: BoolArray | None = None
    """The mask of tokens that stand out, for clip_cov, kl_cov and m2po."""
    old_logprobs: FloatArray | None = None
    """The log pi_old of each token with algorithm.proximal=exact, NaN where it is that of the policy before the step.
    None: it is so everywhere."""
    teacher_logprobs: FloatArray | None = None
    """The log p_teacher of each token at temperature 1, if a teacher has scored them."""
    reference_logprobs: FloatArray | None = None
    """The log pi_ref of each token, if the algorithm needs a reference policy."""
    values: FloatArray | None = None
    """The critic's values before the step, if there is a critic."""
    returns: FloatArray | None = None
    """The critic's targets."""
    kept: KeptTokens | None = None
    """The tokens that each was drawn from, over which its logprobs are normalized. None: the whole vocabulary."""

    @property
    def num_sequences(self) -> int:
        """The number of sequences of a micro-batch, which numbers them without a gap."""
        return int(self.sequences.max(initial=-1)) + 1

    @property
    def is_learning(self) -> BoolArray:
        """[T] bool: the token has a gradient without entropy, KL and critic."""
        learns = self.advantages != 0
        return learns if self.ce_weights is None else learns | (self.ce_weights != 0)

    def take(self, index: NDArray[np.integer]) -> Self:
        """Return the tokens at `index`."""
        kept = None if self.kept is None else self.kept.take(index)
        return replace(self, kept=kept, **{name: array[index] for name, array in self._arrays().items()})

    def renumbered(self) -> Self:
        """Number the sequences 0 .. K - 1, in their order."""
        return replace(self, sequences=np.unique(self.sequences, return_inverse=True)[1].astype(np.int32))

    def followed_by(self, others: Self, num_trajectories: int) -> Self:
        """Return these tokens and then `others`, as one step. A signal that only one side has is 0 on the other.

        Args:
            num_trajectories: the number of these trajectories, those without a token included.
        """
        offsets = {"trajectories": num_trajectories, "sequences": self.sequences.max(initial=-1) + 1}
        mine, theirs = self._arrays(), others._arrays()
        both: dict[str, NDArray] = {}
        for name, like in (theirs | mine).items():
            before = mine.get(name, np.zeros(len(self.targets), like.dtype))
            after = theirs.get(name, np.zeros(len(others.targets), like.dtype)) + offsets.get(name, 0)
            both[name] = join([before, after], like.dtype.type)
        kept = KeptTokens.concatenate([(tokens.kept, len(tokens.targets)) for tokens in (self, others)])
        return replace(self, kept=kept, **both)

    def _arrays(self) -> dict[str, NDArray]:
        """Return the arrays that there are, by name."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kept"}
        return {name: array for name, array in arrays.items() if array is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens:
    """The loss tokens of a step as the training saw them. Arrays [T] in the order of `TokenSignals`; the tokens of a
    rank are in the order of its micro-batches."""

    logprobs: FloatArray
    """The log pi of each token, by the policy before the optimizer step that first trained it. NaN where none was
    computed, because the token had nothing to teach."""
    advantages: FloatArray
    is_clipped: BoolArray
    """The clip of the loss was active: the token has no gradient, or a smaller one."""
    is_rejected: BoolArray
    """The mask of tokens that algorithm.rejection or icepop left out of the policy loss."""
    old_logprobs: FloatArray | None = None
    """The value of `TokenSignals.old_logprobs` with algorithm.proximal=exact, else None."""

    def arrays(self) -> dict[str, NDArray]:
        """Return the arrays that there are, by name."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in arrays.items() if array is not None}

    def first(self, num_tokens: int) -> Self:
        """Return the first tokens."""
        return replace(self, **{name: array[:num_tokens] for name, array in self.arrays().items()})

    def at(self, places: BoolArray) -> Self:
        """Return the tokens at the places."""
        return replace(self, **{name: array[places] for name, array in self.arrays().items()})

    def spread(self, places: BoolArray) -> Self:
        """Return as many tokens as places, of which these are at `places` and none of the others was computed."""
        whole = self.none(len(places)).arrays()
        if self.old_logprobs is not None:
            whole["old_logprobs"] = np.full(len(places), np.nan, np.float32)
        for name, array in self.arrays().items():
            whole[name][places] = array
        return replace(self, **whole)

    @classmethod
    def none(cls, num_tokens: int) -> Self:
        """Return tokens of which none was computed."""
        return cls(
            logprobs=np.full(num_tokens, np.nan, np.float32),
            advantages=np.zeros(num_tokens, np.float32),
            is_clipped=np.zeros(num_tokens, np.bool_),
            is_rejected=np.zeros(num_tokens, np.bool_),
        )


def sampled_tokens(groups: Sequence[TrajectoryGroup], global_steps: int, interval: int = 1) -> TokenSignals:
    """Return the tokens that the policy sampled in `groups`, with advantages and loss weights of 0.

    Args:
        global_steps: steps taken before the one that trains them.
        interval: weight_sync.interval.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    scores = [s.teacher_logprobs[s.loss_mask] for s in sequences if s.teacher_logprobs is not None]
    masks = [sequence.loss_mask for sequence in sequences]
    versions = join([s.token_versions()[mask] for s, mask in zip(sequences, masks, strict=True)], np.int32)
    targets = join([s.response_ids[mask] for s, mask in zip(sequences, masks, strict=True)], np.int32)
    kept = [
        (None if s.kept is None else s.kept.take(np.flatnonzero(mask)), int(mask.sum()))
        for s, mask in zip(sequences, masks, strict=True)
    ]
    return TokenSignals(
        targets=targets,
        trajectories=_numbers([trajectory.num_loss_tokens for trajectory in trajectories]),
        sequences=_numbers([int(mask.sum()) for mask in masks]),
        staleness=staleness(versions, global_steps, interval),
        steps_behind=staleness(versions, global_steps, interval=1),
        rollout_logprobs=join([s.rollout_logprobs[m] for s, m in zip(sequences, masks, strict=True)], np.float32),
        teacher_logprobs=join(scores, np.float32) if scores and len(scores) == len(sequences) else None,
        advantages=np.zeros(len(targets), np.float32),
        loss_weights=np.zeros(len(targets), np.float32),
        kept=KeptTokens.concatenate(kept),
    )


def demonstration_tokens(groups: Sequence[TrajectoryGroup]) -> TokenSignals:
    """Return the tokens of `groups` of demonstrations, which nobody sampled, with cross-entropy weights of 1."""
    tokens = sampled_tokens(groups, global_steps=0)
    fresh, ones = np.zeros_like(tokens.staleness), np.ones(len(tokens.targets), np.float32)
    return replace(tokens, staleness=fresh, steps_behind=fresh, ce_weights=ones)


def aggregation_weights(trajectories: IntArray, aggregation: LossAggregation, horizon: int) -> FloatArray:
    """[T] -> [T]: the weights with which the sum over tokens is the mean (or sum) that `aggregation` names.

    N tokens; B trajectories that have a token; n tokens in the token's own trajectory:
        token_mean               1 / N           DAPO, arXiv:2503.14476, eq. 8
        token_sum                1
        seq_mean_token_sum       1 / B
        seq_mean_token_mean      1 / (B n)       GRPO, arXiv:2402.03300, eq. 3
        seq_mean_token_sum_norm  1 / (B horizon) Dr. GRPO, arXiv:2503.20783
    N and B count every trajectory of the mini-batch, even those that are not computed because they have no gradient.
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


def _numbers(counts: Sequence[int]) -> IntArray:
    """Return each number as often as its count says. Example: [2, 0, 1] gives [0 0 2]."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def join(arrays: Sequence[NDArray], dtype: type) -> NDArray:
    """Concatenate the arrays. Without any, return an empty one."""
    return np.concatenate(arrays).astype(dtype) if len(arrays) else np.empty(0, dtype)
