"""Generalised advantage estimation (GAE): an advantage for each token, from a critic's values."""

import numpy as np

from rollout.types import FloatArray, IntArray


def gae(rewards: FloatArray, values: FloatArray, trajectories: IntArray, gamma: float, lam: float) -> FloatArray:
    """[T] each -> advantages [T] (Schulman et al., arXiv:1506.02438, eq. 16).

    A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t. After a trajectory's last token V and A
    are 0, also where the length limit cut it off. The arrays hold sampled tokens only, so t + 1 is the next sampled
    token. `trajectories` numbers the tokens' trajectories in ascending order.
    """
    lengths = np.bincount(trajectories)
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
    return advantages.astype(np.float32)


def token_rewards(trajectory_rewards: FloatArray, trajectories: IntArray) -> FloatArray:
    """[B], [T] -> [T]: each trajectory's reward at its last token, 0 at the others."""
    rewards = np.zeros(len(trajectories), np.float32)
    is_last = np.append(trajectories[1:] != trajectories[:-1], [True])[: len(trajectories)]
    rewards[is_last] = trajectory_rewards[trajectories[is_last]]
    return rewards


def whiten(values: FloatArray) -> FloatArray:
    """[T] -> [T]: (v - mean) / sqrt(var + 1e-8) with the unbiased variance over all tokens of the step."""
    if len(values) < 2:
        return np.zeros_like(values)
    exact = values.astype(np.float64)
    return ((exact - exact.mean()) / np.sqrt(exact.var(ddof=1) + 1e-8)).astype(np.float32)
