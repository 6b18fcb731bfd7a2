"""Advantages from the return of each token, its trajectory's reward less the penalties from the token on.

A trajectory needs no others of its group, so that algorithm.group_size=1 is enough.
"""

from collections.abc import Sequence

import numpy as np

from rollout.types import FloatArray, TrajectoryGroup
from trainer.advantages.gae import gae, token_rewards, whiten
from trainer.tokens import TokenSignals


def return_advantages(
    name: str, groups: Sequence[TrajectoryGroup], rewards: FloatArray, penalties: FloatArray, tokens: TokenSignals
) -> FloatArray:
    """[B] rewards, [T] penalties of the groups' tokens -> [T] advantages, 0 where a trajectory has no reward.

    reinforce_plus_plus: the return G_t = r - sum of the penalties from t on, whitened over the tokens of the batch
    (REINFORCE++, arXiv:2501.03262). remax: G_t - reward of the greedy response to the same prompt (ReMax,
    arXiv:2310.10505, alg. 1), and 0 where that has none.
    """
    every = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    is_scored = np.array([trajectory.is_scored for _, trajectory in every], np.bool_)
    if name == "remax":
        greedy = [group.greedy for group, _ in every]
        baselines = np.array([0.0 if it is None else it.shaped_reward for it in greedy], np.float32)
        is_scored &= np.array([it is not None and it.is_scored for it in greedy], np.bool_)
        rewards = rewards - baselines
    counts = np.flatnonzero(is_scored[tokens.trajectories])
    advantages = np.zeros(len(tokens.trajectories), np.float32)
    values = token_rewards([trajectory for _, trajectory in every], rewards) - penalties
    # with values of 0 and without discount, GAE is the sum of what follows
    returns = gae(values, np.zeros_like(values), tokens.sequences, 1.0, 1.0)[counts]
    advantages[counts] = whiten(returns) if name == "reinforce_plus_plus" else returns
    return advantages
