"""Step batches for tests: advantages by hand in, micro-batches out."""

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from configs.algorithm import LOSSES, Correction, LossAggregation, Proximal, Rejection
from configs.schema import AlgorithmConfig, Config, Layout
from rollout.types import FloatArray, TrajectoryGroup, VersionSpan
from tests.support.reference import advantages_of, make_group, make_trajectory
from tests.support.sequences import only, with_sequence
from trainer.advantages.credit import assign_credit, keeps_idle
from trainer.batch import StepBatch, assemble
from trainer.losses.objective import Objective
from trainer.metrics import merge_metrics, to_floats
from trainer.tokens import TokenSignals, aggregation_weights, sampled_tokens

STEP = 5
"""Optimizer steps taken before the one that `credited` and `split` make."""
ALGORITHMS = {
    **{f"{loss}": AlgorithmConfig(loss=loss) for loss in LOSSES},
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


def ragged_groups(seed: int) -> list[TrajectoryGroup]:
    """Six groups of four ragged trajectories with holes in their masks, of weights 0 to 4 steps old; one all solved."""
    random = np.random.default_rng(seed)
    groups = []
    for ordinal in range(6):
        trajectories = []
        for index in range(4):
            length = int(random.integers(1, 7))
            trajectories.append(
                make_trajectory(
                    [1] * int(random.integers(1, 4)),
                    random.integers(4, 60, length).tolist(),
                    loss_mask=random.random(length) < 0.8,
                    rollout_logprobs=random.uniform(-3, -0.1, length),
                    spans=(VersionSpan(0, 1, STEP - 4), VersionSpan(1, length, STEP - ordinal % 3)),
                    reward=1.0 if ordinal == 5 else float(random.integers(0, 3)) + index,
                )
            )
        groups.append(
            make_group(ordinal, [with_sequence(t, prompt_ids=only(trajectories[0]).prompt_ids) for t in trajectories])
        )
    return groups


def near_policy(groups: list[TrajectoryGroup], spread: float = 0.3) -> tuple[Tensor, Tensor]:
    """(logprobs, entropies) of a policy near the one that sampled."""
    rollout_logprobs = torch.from_numpy(sampled_tokens(groups, STEP).rollout_logprobs).double()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(rollout_logprobs), generator=generator, dtype=torch.float64)
    return (rollout_logprobs + spread * noise).clamp(max=-0.01), noise.abs()


def credited(groups: Sequence[TrajectoryGroup], algorithm: AlgorithmConfig) -> TokenSignals:
    """Return what every token learns by the algorithm, with a reference policy near the one that sampled."""
    tokens = sampled_tokens(groups, STEP)
    reference = tokens.rollout_logprobs + np.float32(0.3) * np.sin(np.arange(len(tokens.targets), dtype=np.float32))
    logprobs = tokens.rollout_logprobs + np.float32(0.3) * np.cos(np.arange(len(tokens.targets), dtype=np.float32))
    scores = {"reference_logprobs": reference.astype(np.float32), "logprobs": logprobs}
    # Of the few tokens of a test, clip_cov and kl_cov would select one or none.
    with mock.patch.multiple("trainer.advantages.credit", COV_RATIO=0.2, CLIP_COV_BOUNDS=(0.0, 5.0)):
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


def run_objective(
    batch: StepBatch, algorithm: AlgorithmConfig, logprobs: Tensor, entropies: Tensor
) -> tuple[float, Tensor, Tensor, dict[str, float]]:
    """Return the objective, its gradients in the logprobs and the entropies of the step's tokens, and the metrics."""
    objective, total, parts = Objective(algorithm), 0.0, []
    logprobs, entropies = logprobs.clone().requires_grad_(), entropies.clone().requires_grad_()
    for micro_batch in (b for rank in batch.micro_batches for b in rank):
        index = torch.from_numpy(micro_batch.index)
        share = objective(logprobs[index], entropies[index], micro_batch)
        share.loss.backward()
        total += share.loss.item()
        assert len(share.is_clipped) == len(share.is_kept) == len(index)
        parts.append(share.metrics)
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (logprobs, entropies)]
    return total, gradients[0], gradients[1], to_floats(merge_metrics(parts))


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


def ones(groups: Sequence[TrajectoryGroup]) -> list[FloatArray]:
    """Return an advantage of 1 for each trajectory."""
    return [np.ones(len(group.trajectories), np.float32) for group in groups]


def pack(
    groups: Sequence[TrajectoryGroup],
    layout: Layout,
    num_ranks: int = 1,
    budget: int = 10_000,
    *,
    keep_idle: bool = False,
    aggregation: LossAggregation = LossAggregation.token_mean,
    advantages: Sequence[FloatArray] | None = None,
    **known: FloatArray,
) -> StepBatch:
    """Assemble the groups.

    Args:
        advantages: per group [G]; None: GRPO's.
        known: further signals of all the step's tokens.
    """
    if advantages is None:
        advantages = [np.array(advantages_of(group), np.float32) for group in groups]
    return assemble(
        groups,
        replace(learning(groups, advantages, aggregation), **known),
        layout=layout,
        num_ranks=num_ranks,
        tokens_per_micro_batch=budget,
        keep_idle=keep_idle,
    )
