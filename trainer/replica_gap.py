"""Refuses a replica that computes other logprobs than the trainer for the same tokens under the same weights.

vLLM and transformers have an implementation each of most architectures. Where the two differ, nothing crashes: the run
learns from ratios of probabilities that belong to two models.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs.schema import Config, DType
from configs.validate import ConfigError
from rollout.types import FloatArray, TrajectoryGroup
from trainer.tokens import join

TOLERANCE = {DType.float32: 1e-3, DType.bfloat16: 0.1}
"""The largest mean difference in nats a token, by the coarser of trainer.dtype and rollout.dtype. In float32, ten
architectures of vLLM 0.32 are within 1e-5 of transformers at every token, and Cohere 2 is off by 0.1 to 0.6. In
bfloat16, rounding alone is about 0.01 on average, and up to 0.5 at a rare token: hence the mean."""


MANY_TOKENS = 64
"""The number of tokens over which the mean is compared with TOLERANCE, at least. Over n fewer ones, sqrt(64 / n) as
much is allowed: so much more does their mean vary."""


@dataclass(frozen=True, slots=True)
class ReplicaGap:
    """The distance between a replica's logprobs and the trainer's, over tokens of one version."""

    replica: str
    num_tokens: int
    mean: float
    """Mean of |log mu - log pi|; NaN where one of them is."""
    largest: float


def replica_gaps(groups: Sequence[TrajectoryGroup], logprobs: FloatArray, global_steps: int) -> list[ReplicaGap]:
    """Return the gap of each replica that sampled a sequence with the weights `global_steps` and no others. A sequence
    that spans an update read keys and values of two versions, which the trainer does not.

    Args:
        logprobs: [T] the trainer's at `global_steps`, of the loss tokens of `groups`.
    """
    differences: dict[str, list[FloatArray]] = {}
    first_token = 0
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        for sequence in trajectory.sequences:
            own = logprobs[first_token : first_token + int(sequence.loss_mask.sum())]
            first_token += len(own)
            if {span.global_steps for span in sequence.spans} == {global_steps}:
                gap = np.abs(sequence.rollout_logprobs[sequence.loss_mask] - own)
                differences.setdefault(trajectory.replica, []).append(gap)
    if first_token != len(logprobs):
        raise ValueError(f"logprobs of {len(logprobs)} loss tokens, but the groups have {first_token}")
    joined = {replica: join(arrays, np.float64) for replica, arrays in differences.items()}
    return [
        ReplicaGap(replica, len(values), float(values.mean()), float(values.max()))
        for replica, values in joined.items()
        if len(values)
    ]


def tolerance(config: Config, num_tokens: int = MANY_TOKENS) -> float:
    """Return the largest mean difference that is allowed over so many tokens. A low temperature divides logits, and
    their rounding; and a mean of few tokens varies more."""
    few = math.sqrt(MANY_TOKENS / min(num_tokens, MANY_TOKENS))
    if config.trainer.max_logprob_diff is not None:
        return few * config.trainer.max_logprob_diff
    is_coarse = DType.bfloat16 in (config.trainer.dtype, config.rollout.dtype)
    return few * TOLERANCE[DType.bfloat16 if is_coarse else DType.float32] / min(1.0, config.rollout.temperature)


def refuse_other_replicas(gaps: Sequence[ReplicaGap], config: Config, global_steps: int) -> None:
    """Raise ConfigError, which names each replica whose gap is larger than the tolerance."""
    wrong = [gap for gap in gaps if not gap.mean <= tolerance(config, gap.num_tokens)]  # NaN too
    if not wrong:
        return
    allowed = tolerance(config, wrong[0].num_tokens)
    named = " and ".join(
        f"{gap.replica} is off by {gap.mean:.2g} nats a token on average and {gap.largest:.2g} at most, over "
        f"{gap.num_tokens} tokens"
        for gap in wrong
    )
    key = f"trainer.max_logprob_diff={config.trainer.max_logprob_diff}"
    raise ConfigError(
        f"{key}: replica and trainer compute two models of {config.model.path or 'the tiny model'}, with the same "
        f"weights (version {global_steps}) and the same tokens: {named}; at most {allowed:g} on average are allowed "
        "between these number formats. Every ratio of a run would be wrong by as much (docs/models.md). A larger value "
        "accepts it, 0 does not compare"
    )
