"""Generalised advantage estimation (GAE): an advantage for each token, from a critic's values."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.types import ROUNDING, FloatArray, IntArray, Trajectory

Reals = NDArray[np.float32] | NDArray[np.float64]


def gae(rewards: Reals, values: Reals, sequences: IntArray, gamma: float, lam: float) -> NDArray[np.float64]:
    """[T] each -> advantages [T] (Schulman et al., arXiv:1506.02438, eq. 16).

    A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t. After a sequence's last token V and A
    are 0, also where the length limit cut it off. The arrays hold sampled tokens only, so t + 1 is the next sampled
    token. `sequences` numbers the tokens' sequences in ascending order.
    """
    lengths = np.bincount(sequences)
    ends = np.cumsum(lengths) - 1
    advantages = np.zeros(len(rewards))
    next_value, next_advantage = np.zeros(len(lengths)), np.zeros(len(lengths))
    for steps_before_end in range(lengths.max(initial=0)):
        running = lengths > steps_before_end
        token = ends[running] - steps_before_end
        delta = rewards[token] + gamma * next_value[running] - values[token]
        next_advantage[running] = delta + gamma * lam * next_advantage[running]
        next_value[running] = values[token]
        advantages[token] = next_advantage[running]
    return advantages


def rest_of_reward(trajectory: Trajectory, reward: float) -> float:
    """Return what of `reward`, the trajectory's shaped or penalised one, none of its turns brought: 0 where only
    rounding is left."""
    turns = (turn.reward for sequence in trajectory.sequences for turn in sequence.turn_rewards)
    rest = math.fsum((reward, *(-brought for brought in turns)))
    return 0.0 if abs(rest) <= ROUNDING * trajectory.largest_reward else rest


def token_rewards(trajectories: Sequence[Trajectory], rewards: Reals) -> NDArray[np.float64]:
    """[B] rewards of the trajectories -> [T]: what each of their loss tokens brought. A turn's reward is at the last
    loss token up to its end, the rest of the trajectory's at the last token of each of its sequences: of branches, each
    is an end. The reward of a turn without a loss token up to it, because all are masked, is nobody's: a later token
    did not bring it."""
    token_values = np.zeros(sum(trajectory.num_loss_tokens for trajectory in trajectories))
    first_token = 0
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        rest = rest_of_reward(trajectory, float(reward))
        for sequence in trajectory.sequences:
            ends = sequence.loss_mask.cumsum()  # of each response token: how many loss tokens there are up to it
            if not len(ends) or not ends[-1]:
                continue
            for turn in sequence.turn_rewards:
                if num_before := int(ends[turn.end - 1]):
                    token_values[first_token + num_before - 1] += turn.reward
            token_values[first_token + ends[-1] - 1] += rest
            first_token += int(ends[-1])
    return token_values


def whiten(values: Reals) -> FloatArray:
    """[T] -> [T]: (v - mean) / sqrt(var + 1e-8) with the unbiased variance over all tokens of the step; exactly 0 where
    the values do not differ."""
    if len(values) < 2 or not np.ptp(values):
        return np.zeros(len(values), np.float32)
    exact = values.astype(np.float64)
    return ((exact - exact.mean()) / np.sqrt(exact.var(ddof=1) + 1e-8)).astype(np.float32)
