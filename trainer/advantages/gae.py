"""Generalised advantage estimation (GAE): an advantage for each token, from a critic's values."""

from collections.abc import Sequence

import numpy as np

from rollout.types import FloatArray, IntArray, Trajectory


def gae(rewards: FloatArray, values: FloatArray, sequences: IntArray, gamma: float, lam: float) -> FloatArray:
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
    return advantages.astype(np.float32)


def token_rewards(trajectories: Sequence[Trajectory], rewards: FloatArray) -> FloatArray:
    """[B] rewards of the trajectories -> [T]: what each of their loss tokens brought. A turn's reward is at the turn's
    last token, the rest of the trajectory's at the last token of each of its sequences: of branches, each is an end."""
    found = np.zeros(sum(trajectory.num_loss_tokens for trajectory in trajectories), np.float32)
    first_token = 0
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        of_turns = sum(turn.reward for sequence in trajectory.sequences for turn in sequence.turn_rewards)
        for sequence in trajectory.sequences:
            ends = sequence.loss_mask.cumsum()  # of each response token: how many loss tokens there are up to it
            if not len(ends) or not ends[-1]:
                continue
            for turn in sequence.turn_rewards:
                found[first_token + max(ends[turn.end - 1] - 1, 0)] += turn.reward
            found[first_token + ends[-1] - 1] += reward - of_turns
            first_token += int(ends[-1])
    return found


def whiten(values: FloatArray) -> FloatArray:
    """[T] -> [T]: (v - mean) / sqrt(var + 1e-8) with the unbiased variance over all tokens of the step."""
    if len(values) < 2:
        return np.zeros_like(values)
    exact = values.astype(np.float64)
    return ((exact - exact.mean()) / np.sqrt(exact.var(ddof=1) + 1e-8)).astype(np.float32)
