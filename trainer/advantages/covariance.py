"""Which tokens of a step change its entropy the most, by the covariance of their logprob and advantage.

Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617):
cov_t = (log pi_t - mean log pi)(A_t - mean A), over all tokens of the step. We take the logprobs of the policy that
sampled them: those are known before the step, so that no split of the step changes the choice.
"""

import numpy as np

from rollout.types import BoolArray, FloatArray


def covariances(rollout_logprobs: FloatArray, advantages: FloatArray) -> FloatArray:
    """[T], [T] -> [T]."""
    centered = rollout_logprobs - rollout_logprobs.mean(dtype=np.float64)
    return (centered * (advantages - advantages.mean(dtype=np.float64))).astype(np.float32)


def clip_cov_tokens(
    covariances: FloatArray, ratio: float, low: float, high: float, random: np.random.Generator
) -> BoolArray:
    """[T]: a share `ratio` of all tokens (at least one), drawn from those whose covariance is above low and below high;
    fewer where there are no more."""
    candidates = np.flatnonzero((covariances > low) & (covariances < high))
    count = min(_share(covariances, ratio), len(candidates))
    return _marked(random.choice(candidates, count, replace=False), len(covariances))


def kl_cov_tokens(covariances: FloatArray, ratio: float) -> BoolArray:
    """[T]: the share `ratio` of all tokens (at least one) with the largest covariances."""
    return _marked(np.argsort(-covariances, kind="stable")[: _share(covariances, ratio)], len(covariances))


def _share(values: FloatArray, ratio: float) -> int:
    return max(1, int(ratio * len(values)))


def _marked(index: np.ndarray, length: int) -> BoolArray:
    marked = np.zeros(length, np.bool_)
    marked[index] = True
    return marked
