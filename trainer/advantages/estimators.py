"""Advantage estimators: from the rewards of a step's groups to one number per trajectory, which all its tokens get.

All have one signature, because some look at the whole batch: `(groups, algorithm) -> [G] per group`. They are chosen
by `algorithm.advantage`, by name or as `package.module:function`. Formulas are of outcome rewards, without discount.
Where rewards do not differ the advantage is exactly 0, so that such a trajectory is not computed at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.runtime.dotted import find
from configs.schema import AlgorithmConfig
from rollout.types import FloatArray, IntArray

EPSILON = 1e-6
Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredGroup:
    """The trajectories of one prompt that have a reward, two or more.

    Example: ScoredGroup(rewards=[1, 0, 0], lengths=[12, 40, 7])
    """

    rewards: FloatArray  # [G]
    lengths: IntArray  # [G] tokens of the policy, 1 or more
    greedy_reward: float | None = None
    """Of a greedy response to the prompt, with algorithm.advantage=remax; None where that has no reward."""


Estimator = Callable[[Sequence[ScoredGroup], AlgorithmConfig], Sequence[FloatArray]]
"""(groups, algorithm) -> advantages, one array [G] per group."""


def grpo(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[FloatArray]:
    """(r - mean) / (std + 1e-6), with the unbiased std over the group (GRPO, arXiv:2402.03300, eq. 3).

    `normalize_by_std=false` leaves the division out (Dr. GRPO, arXiv:2503.20783).
    """
    return [_float32(_centered(g.rewards) / _scale(g.rewards, algorithm)) for g in groups]


def rloo(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """r_i - mean of the others = (G r_i - sum) / (G - 1) (RLOO, leave one out, arXiv:2402.14740)."""
    return [_float32(_centered(g.rewards) * len(g.rewards) / (len(g.rewards) - 1)) for g in groups]


def opo(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """r - sum(l r) / sum(l), l being lengths: the baseline of least variance, if the squared norm of a response's
    gradient grows with its length (OPO, arXiv:2505.23585)."""
    return [_float32(_centered(g.rewards, g.lengths)) for g in groups]


def grpo_passk(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[FloatArray]:
    """The best response gets r_1st - r_2nd, the others 0: the gradient of the group's maximum (arXiv:2503.19595).

    Divided by the group's std as in `grpo`, unless `normalize_by_std=false`.
    """
    advantages = []
    for g in groups:
        second, first = np.sort(g.rewards.astype(np.float64))[-2:]
        is_best = np.arange(len(g.rewards)) == g.rewards.argmax()
        advantages.append(_float32(is_best * (first - second) / _scale(g.rewards, algorithm)))
    return advantages


def gpg(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """alpha (r - mean), alpha = B / (B - M): of B responses, M are in groups of equal rewards, which have no gradient
    but are counted in the loss's denominator (GPG, arXiv:2504.02546, with F_norm = 1).

    verl counts the responses of reward 0 instead of M.
    """
    num_responses = sum(len(g.rewards) for g in groups)
    num_learning = sum(len(g.rewards) for g in groups if np.ptp(g.rewards) > 0)
    alpha = num_responses / max(num_learning, 1)
    return [_float32(alpha * _centered(g.rewards)) for g in groups]


def reinforce_plus_plus(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """r, whitened over the tokens of the batch: no baseline of the prompt's own (REINFORCE++, arXiv:2501.03262)."""
    return _whitened([g.rewards.astype(np.float64) for g in groups], groups)


def reinforce_plus_plus_baseline(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """r - mean of the group, whitened over the tokens of the batch (REINFORCE++-baseline, arXiv:2501.03262)."""
    return _whitened([_centered(g.rewards) for g in groups], groups)


def remax(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """r - reward of the greedy response to the same prompt (ReMax, arXiv:2310.10505, alg. 1)."""
    return [g.rewards - (g.rewards if g.greedy_reward is None else np.float32(g.greedy_reward)) for g in groups]


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "grpo_passk": grpo_passk,
    "gpg": gpg,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
}


def load_estimator(name: str) -> Estimator:
    """Raises ValueError when `name` is neither built in nor a function `package.module:function` of two arguments."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    return find("algorithm.advantage", name, ("groups", "algorithm"), known=tuple(ESTIMATORS))


def _centered(rewards: FloatArray, weights: IntArray | None = None) -> Float64Array:
    """Minus the (weighted) mean; exactly 0 where all are equal, since float32 numbers add up in float64 exactly."""
    exact = rewards.astype(np.float64)
    return exact - np.average(exact, weights=weights)


def _scale(rewards: FloatArray, algorithm: AlgorithmConfig) -> float:
    return float(rewards.std(ddof=1, dtype=np.float64)) + EPSILON if algorithm.normalize_by_std else 1.0


def _whitened(values: list[Float64Array], groups: Sequence[ScoredGroup]) -> list[FloatArray]:
    """(v - mean) / sqrt(var + 1e-8) over all tokens of the batch, each of which has its trajectory's value; var is
    unbiased, with the number of tokens."""
    flat = np.concatenate(values)
    lengths = np.concatenate([g.lengths for g in groups])
    mean = np.average(flat, weights=lengths)
    variance = (lengths * (flat - mean) ** 2).sum() / (lengths.sum() - 1)
    return [_float32((value - mean) / np.sqrt(variance + 1e-8)) for value in values]


def _float32(values: Float64Array) -> FloatArray:
    return values.astype(np.float32)
