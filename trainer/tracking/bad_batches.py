"""Batches that break an optimizer step by NaN or infinity: found, named, and kept for debugging."""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO

import numpy as np

from rollout.types import FloatArray, TrajectoryGroup
from trainer.tokens import join


class SkippedStepsError(RuntimeError):
    """More optimizer steps were skipped than trainer.max_skipped_steps. The message names step, batch and prompts."""


def broken_rollouts(groups: Sequence[TrajectoryGroup]) -> str | None:
    """Name the trajectories with a sampled token whose rollout logprob is not finite; None if there is none."""
    broken = [
        f"{trajectory.replica}, prompt {group.prompt.ordinal}, trajectory {index}"
        for group in groups
        for index, trajectory in enumerate(group.trajectories)
        if not np.isfinite(trajectory.rollout_logprobs[trajectory.loss_mask]).all()
    ]
    return f"rollout logprobs are not finite: {'; '.join(broken)}" if broken else None


def not_finite(metrics: Mapping[str, float]) -> str:
    """Name the metrics of an optimizer step that are NaN or infinite."""
    names = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
    return f"not finite: {', '.join(names) or 'logprobs'}"


def bad_batch(groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray]) -> bytes:
    """Return the batch as a file for `numpy.load`.

    `ordinals`, `replicas`, `rewards`, `advantages`, `prompt_lengths` and `response_lengths` are [B].
    The trajectories' tokens are concatenated: `prompt_ids` [sum of prompt lengths]; `response_ids`, `loss_mask`,
    `rollout_logprobs` and `versions` [sum of response lengths].
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    file = BytesIO()
    np.savez(
        file,
        ordinals=np.array([group.prompt.ordinal for group in groups for _ in group.trajectories]),
        replicas=np.array([trajectory.replica for trajectory in trajectories]),
        rewards=np.array([trajectory.reward for trajectory in trajectories]),
        advantages=join(list(advantages), np.float32),
        prompt_lengths=np.array([len(trajectory.prompt_ids) for trajectory in trajectories]),
        response_lengths=np.array([len(trajectory.response_ids) for trajectory in trajectories]),
        prompt_ids=join([trajectory.prompt_ids for trajectory in trajectories], np.int32),
        response_ids=join([trajectory.response_ids for trajectory in trajectories], np.int32),
        loss_mask=join([trajectory.loss_mask for trajectory in trajectories], np.bool_),
        rollout_logprobs=join([trajectory.rollout_logprobs for trajectory in trajectories], np.float32),
        versions=join([trajectory.token_versions() for trajectory in trajectories], np.int32),
    )
    return file.getvalue()
