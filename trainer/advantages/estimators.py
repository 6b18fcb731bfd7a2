"""Group-relative advantage estimators: from the rewards of a step's groups to one number per trajectory.

All have one signature, because some look at the whole batch: `(groups, algorithm) -> [G] per group`.
`algorithm.advantage` chooses one, by name or as `package.module:function`. The formulas take outcome rewards, without
discount. Where rewards do not differ the advantage is exactly 0, so that such a trajectory need not be computed: a
standard deviation that is only rounding would make advantages of full size of it (`merge_rounded`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from configs.algorithm import ADVANTAGE_PARAMETERS, ADVANTAGES
from configs.runtime.dotted import find
from configs.schema import AlgorithmConfig
from rollout.types import ROUNDING, BoolArray, FloatArray, IntArray, Trajectory, TrajectoryGroup

EPSILON = 1e-6
Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredGroup:
    """The trajectories of one prompt that have a reward: at least two.

    Example: ScoredGroup(rewards=[1, 0, 0], lengths=[12, 40, 7])
    """

    rewards: Float64Array  # [G] those that differ by rounding only are equal
    lengths: IntArray  # [G] tokens that the policy sampled, at least 1
    terms: Mapping[str, Float64Array] = field(default_factory=dict)  # [G] those of algorithm.gdpo_weights


Estimator = Callable[[Sequence[ScoredGroup], AlgorithmConfig], Sequence[FloatArray]]
"""(groups, algorithm) -> advantages, one array [G] per group."""


def grpo(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[FloatArray]:
    """(r - mean) / (std + 1e-6), with the unbiased std over the group (GRPO, arXiv:2402.03300, eq. 3).

    `normalize_by_std=false` leaves the division out (Dr. GRPO, arXiv:2503.20783).
    """
    return [_float32(_centered(g.rewards) / _scale(g.rewards, algorithm)) for g in groups]


def rloo(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """Return r_i - mean of the others = (G r_i - sum) / (G - 1) (RLOO, leave one out, arXiv:2402.14740)."""
    return [_float32(_centered(g.rewards) * len(g.rewards) / (len(g.rewards) - 1)) for g in groups]


def opo(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """Return r - sum(l r) / sum(l), l being lengths: the baseline of least variance, if the squared norm of a
    response's gradient grows with its length (OPO, arXiv:2505.23585)."""
    return [_float32(_centered(g.rewards, g.lengths)) for g in groups]


def grpo_passk(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[FloatArray]:
    """The best response gets r_1st - r_2nd, the others 0: the gradient of the group's maximum (arXiv:2503.19595).

    Divided by the group's std as in `grpo`, unless `normalize_by_std=false`.
    """
    advantages = []
    for g in groups:
        second, first = np.sort(g.rewards)[-2:]
        is_best = np.arange(len(g.rewards)) == g.rewards.argmax()
        advantages.append(_float32(is_best * (first - second) / _scale(g.rewards, algorithm)))
    return advantages


def gpg(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """Return alpha (r - mean), alpha = B / (B - M): of B responses, M are in groups of equal rewards, which have no
    gradient but are counted in the loss's denominator (GPG, arXiv:2504.02546, with F_norm = 1). verl counts the
    responses of reward 0 instead of M."""
    num_responses = sum(len(g.rewards) for g in groups)
    num_learning = sum(len(g.rewards) for g in groups if np.ptp(g.rewards) > 0)
    alpha = num_responses / max(num_learning, 1)
    return [_float32(alpha * _centered(g.rewards)) for g in groups]


def reinforce_plus_plus_baseline(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """Return r - mean of the group, whitened over the tokens of the batch (REINFORCE++-baseline, arXiv:2501.03262):
    less its mean, divided by sqrt(var + 1e-8), each token having its trajectory's value; var is unbiased."""
    return _whitened([_centered(g.rewards) for g in groups], groups)


def maxrl(groups: Sequence[ScoredGroup], _algorithm: AlgorithmConfig) -> list[FloatArray]:
    """Return (r - mean) / mean, and 0 where the mean is 0 (MaxRL, arXiv:2602.02710): the gradient of the likelihood of
    a right answer, expanded up to order G, where r - mean is that of its probability. A prompt that one response in ten
    solves counts ten times as much.

    Raises:
        ValueError: a reward is below 0: a mean near 0 would make advantages without a bound.
    """
    if (lowest := min(float(g.rewards.min()) for g in groups)) < 0:
        raise ValueError(f"algorithm.advantage=maxrl: a reward is {lowest:g}, and may not be below 0")
    means = [float(g.rewards.mean()) or np.inf for g in groups]
    return [_float32(_centered(g.rewards) / mean) for g, mean in zip(groups, means, strict=True)]


def gdpo(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[FloatArray]:
    """Return the weighted sum of each reward's own advantage in the group, as `grpo` computes it, whitened as in
    reinforce_plus_plus_baseline (GDPO, arXiv:2601.05242): no reward drowns another that varies less."""
    sums = [np.zeros(len(g.rewards)) for g in groups]
    for group, total in zip(groups, sums, strict=True):
        for name, weight in algorithm.gdpo_weights.items():
            total += weight * _centered(group.terms[name]) / _scale(group.terms[name], algorithm)
    return _whitened(sums, groups)


ESTIMATORS: dict[str, Estimator] = {
    estimator.__name__: estimator
    for estimator in (grpo, rloo, opo, grpo_passk, gpg, reinforce_plus_plus_baseline, maxrl, gdpo)
}


def load_estimator(name: str) -> Estimator:
    """Return the estimator that `algorithm.advantage` names.

    Raises:
        ValueError: the name is neither built in nor a function `package.module:function` of two arguments.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    return find("algorithm.advantage", name, ADVANTAGE_PARAMETERS, known=ADVANTAGES)


def group_advantages(
    groups: Sequence[TrajectoryGroup],
    rewards: Sequence[Float64Array],
    estimator: Estimator,
    algorithm: AlgorithmConfig,
) -> list[FloatArray]:
    """Return one array [G] per group, with 0 for trajectories without a reward and for groups with fewer than two.

    Args:
        rewards: per group [G]; entries of trajectories without a reward are not read.

    Raises:
        ValueError: a user's own estimator returned another shape, or a number that is not finite.
    """
    advantages = [np.zeros(len(group.trajectories), np.float32) for group in groups]
    scored = [np.array([trajectory.is_scored for trajectory in group.trajectories]) for group in groups]
    usable = [index for index, has_reward in enumerate(scored) if has_reward.sum() >= 2]
    if not usable:
        return advantages
    scored_groups = [_scored_group(groups[index], rewards[index], scored[index], algorithm) for index in usable]
    estimates = list(estimator(scored_groups, algorithm))
    shapes = [np.shape(estimate) for estimate in estimates]
    expected = [(int(scored[index].sum()),) for index in usable]
    if shapes != expected:
        raise ValueError(f"algorithm.advantage={algorithm.advantage}: gave arrays of shape {shapes}, not {expected}")
    for index, estimate in zip(usable, estimates, strict=True):
        if not np.isfinite(estimate).all():
            ordinal = groups[index].prompt.ordinal
            raise ValueError(f"algorithm.advantage={algorithm.advantage}: gave {estimate} for prompt {ordinal}")
        advantages[index][scored[index]] = estimate
    return advantages


def merge_rounded(values: Float64Array, rounding: float) -> Float64Array:
    """Return the values with one number for those that are at most `rounding` apart: the smallest of them."""
    merged = values.astype(np.float64)
    smallest = -np.inf
    for place in np.argsort(merged, kind="stable"):
        if merged[place] - smallest <= rounding:
            merged[place] = smallest
        else:
            smallest = merged[place]
    return merged


def _scored_group(
    group: TrajectoryGroup, rewards: Float64Array, has_reward: BoolArray, algorithm: AlgorithmConfig
) -> ScoredGroup:
    scored = [trajectory for trajectory, has in zip(group.trajectories, has_reward, strict=True) if has]
    largest = max(trajectory.largest_reward for trajectory in scored)
    return ScoredGroup(
        rewards=merge_rounded(rewards[has_reward], ROUNDING * largest),
        lengths=np.array([max(1, trajectory.num_loss_tokens) for trajectory in scored], np.int32),
        terms={name: _term(name, group, scored) for name in algorithm.gdpo_weights},
    )


def _term(name: str, group: TrajectoryGroup, scored: Sequence[Trajectory]) -> Float64Array:
    """Return [G] what the reward reported under the name."""
    for trajectory in scored:
        if name not in trajectory.reward_metrics:
            reported = ", ".join(trajectory.reward_metrics) or "nothing"
            where = f"the reward of prompt {group.prompt.ordinal} reported {reported}"
            raise ValueError(f"algorithm.gdpo_weights: {where}, and no {name!r}")
    values = np.array([trajectory.reward_metrics[name] for trajectory in scored], np.float64)
    return merge_rounded(values, ROUNDING * float(np.abs(values).max()))


def _whitened(values: Sequence[Float64Array], groups: Sequence[ScoredGroup]) -> list[FloatArray]:
    """Return the values less their mean, divided by sqrt(var + 1e-8), over the tokens of the batch, each of which has
    the value of its trajectory."""
    flat, lengths = np.concatenate(values), np.concatenate([g.lengths for g in groups])
    mean = np.average(flat, weights=lengths)
    variance = (lengths * (flat - mean) ** 2).sum() / (lengths.sum() - 1)
    return [_float32((some - mean) / np.sqrt(variance + 1e-8)) for some in values]


def _centered(rewards: Float64Array, weights: IntArray | None = None) -> Float64Array:
    """Subtract the (weighted) mean. Equal rewards give exactly 0: they lose the smallest first, and nothing is left to
    round."""
    above = rewards - rewards.min()
    return above - np.average(above, weights=weights)


def _scale(rewards: Float64Array, algorithm: AlgorithmConfig) -> float:
    return float(rewards.std(ddof=1)) + EPSILON if algorithm.normalize_by_std else 1.0


def _float32(values: Float64Array) -> FloatArray:
    return values.astype(np.float32)
