"""Step batches for tests: advantages by hand in, micro-batches out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from configs.algorithm import LOSSES, Correction, LossAggregation, Proximal, Rejection
from configs.schema import AlgorithmConfig, Config, Layout
from rollout.types import FloatArray, TrajectoryGroup
from tests.support.reference import advantages_of
from trainer.advantages.credit import assign_credit, keeps_idle
from trainer.batch import StepBatch, assemble
from trainer.tokens import TokenSignals, aggregation_weights, sampled_tokens

STEP = 5
"""Optimizer steps taken before the one that `credited` and `split` make."""
ALGORITHMS = {
    **{f"{loss}": AlgorithmConfig(loss=loss, cov_ratio=0.2, clip_cov_low=0.0) for loss in LOSSES},
    **{f"{how.value}": AlgorithmConfig(loss_aggregation=how, loss_horizon=9) for how in LossAggregation},
    "everything at once": AlgorithmConfig(
        loss="gspo",
        proximal=Proximal.interpolated,
        correction=Correction.seq_is,
        rejection=Rejection.seq_max_k2,
        rejection_high=0.2,
        entropy_coef=0.01,
        kl_loss_coef=0.1,
    ),
}
"""One of every kind of loss, by name."""


def credited(groups: Sequence[TrajectoryGroup], algorithm: AlgorithmConfig) -> TokenSignals:
    """What every token learns by the algorithm, with a reference policy near the one that sampled."""
    tokens = sampled_tokens(groups, STEP)
    reference = tokens.rollout_logprobs + np.float32(0.3) * np.sin(np.arange(len(tokens.targets), dtype=np.float32))
    scores = {"reference_logprobs": reference.astype(np.float32)}
    return assign_credit(groups, tokens, scores, Config(algorithm=algorithm), STEP).tokens


def split(
    groups: Sequence[TrajectoryGroup], algorithm: AlgorithmConfig, layout: Layout, num_ranks: int, budget: int
) -> StepBatch:
    """The step as the algorithm trains it."""
    return assemble(
        groups,
        credited(groups, algorithm),
        layout=layout,
        num_ranks=num_ranks,
        tokens_per_micro_batch=budget,
        keep_idle=keeps_idle(algorithm),
    )


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
