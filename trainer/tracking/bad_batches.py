"""Batches that break an optimizer step by NaN or infinity: found and named."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rollout.types import TrajectoryGroup


class SkippedStepsError(RuntimeError):
    """More steps were skipped than trainer.max_skipped_steps. The message names step, batch and prompts."""


def broken_rollouts(groups: Sequence[TrajectoryGroup]) -> str | None:
    """Name the trajectories with a sampled token whose rollout logprob is not finite; None if there is none."""
    broken = [
        f"{trajectory.replica}, prompt {group.prompt.ordinal}, trajectory {index}"
        for group in groups
        for index, trajectory in enumerate(group.trajectories)
        if not all(np.isfinite(s.rollout_logprobs[s.loss_mask]).all() for s in trajectory.sequences)
    ]
    return f"rollout logprobs are not finite: {'; '.join(broken)}" if broken else None


def not_finite(metrics: Mapping[str, float]) -> str:
    """Name the metrics of a step that are NaN or infinite."""
    names = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
    return f"not finite: {', '.join(names) or 'logprobs'}"
