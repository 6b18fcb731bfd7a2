"""From the trajectory groups of a step to their advantages, and what leaves the loss altogether."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from configs.schema import AlgorithmConfig
from rollout.types import BoolArray, FloatArray, Trajectory, TrajectoryGroup
from trainer.advantages.estimators import Estimator, ScoredGroup


def advantages_of(
    groups: Sequence[TrajectoryGroup],
    rewards: Sequence[FloatArray],
    estimator: Estimator,
    algorithm: AlgorithmConfig,
) -> list[FloatArray]:
    """One array [G] per group. A trajectory without a reward takes no part and gets 0; so does a whole group that has
    fewer than two rewards. Raises ValueError when an estimator of the user's own answers in another shape, or with a
    number that is not finite.

    `rewards`: per group [G], what is learned; a number that is not read where there is no reward.
    """
    advantages = [np.zeros(len(group.trajectories), np.float32) for group in groups]
    scored = [np.array([trajectory.is_scored for trajectory in group.trajectories]) for group in groups]
    usable = [index for index, has_reward in enumerate(scored) if has_reward.sum() >= 2]
    if not usable:
        return advantages
    taking_part = [_scored_group(groups[index], rewards[index], scored[index]) for index in usable]
    estimates = list(estimator(taking_part, algorithm))
    shapes = [np.shape(estimate) for estimate in estimates]
    expected = [(int(scored[index].sum()),) for index in usable]
    if shapes != expected:
        raise ValueError(f"algorithm.advantage={algorithm.advantage}: gave arrays of shape {shapes}, not {expected}")
    for index, estimate in zip(usable, estimates, strict=True):
        if not np.all(np.isfinite(estimate)):
            ordinal = groups[index].prompt.ordinal
            raise ValueError(f"algorithm.advantage={algorithm.advantage}: gave {estimate} for prompt {ordinal}")
        advantages[index][scored[index]] = estimate
    return advantages


def is_trainable(trajectory: Trajectory, mask_truncated: bool) -> bool:
    return trajectory.is_scored and not (mask_truncated and trajectory.finish_reason == "length")


def trainable(groups: Sequence[TrajectoryGroup], mask_truncated: bool) -> list[TrajectoryGroup]:
    """The groups with the loss masks of trajectories emptied that are not scored, and with `mask_truncated` those that
    did not end by themselves: overlong filtering (DAPO, arXiv:2503.14476, sec. 3.4).

    The reward of a truncated trajectory stays in its group's baseline, as in SkyRL and TRL; the DAPO paper does not
    say. Its tokens leave the denominator of the loss too.
    """

    def masked(trajectory: Trajectory) -> Trajectory:
        if is_trainable(trajectory, mask_truncated):
            return trajectory
        return replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))

    return [replace(group, trajectories=tuple(map(masked, group.trajectories))) for group in groups]


def _scored_group(group: TrajectoryGroup, rewards: FloatArray, has_reward: BoolArray) -> ScoredGroup:
    scored = [trajectory for trajectory, has in zip(group.trajectories, has_reward, strict=True) if has]
    greedy = group.greedy
    return ScoredGroup(
        rewards=rewards[has_reward],
        lengths=np.array([max(1, trajectory.loss_mask.sum()) for trajectory in scored], np.int32),
        greedy_reward=None if greedy is None or not greedy.is_scored else greedy.shaped_reward,
    )
