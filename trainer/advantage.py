"""Group advantages: from the rewards of a group to one number per trajectory."""

import numpy as np

from rollout.types import FloatArray

EPSILON = 1e-6


def grpo(rewards: FloatArray, normalize_by_std: bool = True) -> FloatArray:
    """[G] -> [G]: (r - mean) / (std + 1e-6), with the unbiased std over the group (GRPO, arXiv:2402.03300, eq. 3).

    `normalize_by_std=False` leaves the division out (Dr. GRPO, arXiv:2503.20783). Rewards that are all equal, and a
    group of one, give exactly 0.
    """
    if len(rewards) == 1 or np.all(rewards == rewards[0]):
        return np.zeros(len(rewards), np.float32)
    centered = rewards.astype(np.float64) - rewards.mean(dtype=np.float64)
    if normalize_by_std:
        centered = centered / (rewards.std(ddof=1, dtype=np.float64) + EPSILON)
    return centered.astype(np.float32)
