"""Step batches for tests: advantages by hand in, micro-batches out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from configs.algorithm import LossAggregation
from configs.schema import Layout
from rollout.types import FloatArray, TrajectoryGroup
from tests.support.reference import advantages_of
from trainer.batch import StepBatch, assemble
from trainer.tokens import TokenSignals, aggregation_weights, sampled_tokens


def learning(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[FloatArray],
    aggregation: LossAggregation = LossAggregation.token_mean,
) -> TokenSignals:
    """`advantages`: per group [G], the same for all tokens of a trajectory."""
    tokens = sampled_tokens(groups, global_steps=0)
    flat = np.concatenate([*advantages, np.empty(0, np.float32)])
    return replace(
        tokens,
        advantages=flat[tokens.trajectories],
        loss_weights=aggregation_weights(tokens.trajectories, aggregation, horizon=10),
    )


def pack(
    groups: Sequence[TrajectoryGroup],
    layout: Layout,
    num_ranks: int = 1,
    budget: int = 10_000,
    *,
    keep_idle: bool = False,
    aggregation: LossAggregation = LossAggregation.token_mean,
    **known: FloatArray,
) -> StepBatch:
    """With GRPO's advantages. `known`: further signals of all the step's tokens."""
    advantages = [np.array(advantages_of(group), np.float32) for group in groups]
    return assemble(
        groups,
        replace(learning(groups, advantages, aggregation), **known),
        layout=layout,
        num_ranks=num_ranks,
        tokens_per_micro_batch=budget,
        keep_idle=keep_idle,
    )
