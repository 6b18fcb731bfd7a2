"""Recomputes the advantages of a step from its recorded rewards, in code of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Self

from omegaconf import DictConfig

from trainer.tracking.trajectories import TrajectoryRecord

TOLERANCE = 1e-4
"""The largest difference, absolute below 1 and relative above: records hold six decimals of a float32."""
EQUAL = 1e-9
"""The share of the largest reward below which a difference of rewards may be rounding."""


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """The way in which a config makes advantages of rewards.

    Example: AdvantageRule.of(config).wrong(records) yields sentences, none in a sound step.
    """

    name: str
    """The built-in estimator."""
    normalizes: bool
    weights: Mapping[str, float]
    """The rewards of gdpo by name, with their weights."""
    by_turns: bool
    """Turns that are rewarded have advantages of their own: then those of whole trajectories are not recomputed."""

    @classmethod
    def of(cls, config: DictConfig) -> Self | None:
        """Return the rule; None where rewards alone do not decide: a critic, a teacher, penalties by token, or an
        estimator of the user's."""
        algorithm = config.algorithm
        others = algorithm.kl_reward_coef or config.teacher.path is not None
        if others or algorithm.advantage not in ESTIMATORS:
            return None
        weights = dict(algorithm.get("gdpo_weights") or {})  # a run of an older version has no such key
        return cls(algorithm.advantage, algorithm.normalize_by_std, weights, algorithm.turn_credit)

    def wrong(self, records: Sequence[TrajectoryRecord]) -> Iterator[str]:
        """Yield a sentence for each trajectory of a step whose advantage does not follow from the rewards of its
        group."""
        if self.by_turns and any(sequence.turn_rewards for record in records for sequence in record.sequences):
            return
        by_prompt: dict[int, list[TrajectoryRecord]] = {}
        for record in records:
            by_prompt.setdefault(record.ordinal, []).append(record)
        groups = [_Group(group) for group in by_prompt.values()]
        ESTIMATORS[self.name]([group for group in groups if len(group.rewards) >= 2], self)
        for group in groups:
            if group.is_rounding or any(_is_rounding(group.term(name)) for name in self.weights):
                continue
            for record, expected in zip(group.records, group.by_record(), strict=True):
                recorded = record.advantage or 0.0
                if not abs(recorded - expected) <= TOLERANCE * max(1.0, abs(expected)):
                    where = f"prompt {record.ordinal}, trajectory {record.index}"
                    yield f"{where}: its advantage is {recorded:g}, the rewards of its group make it {expected:g}"


class _Group:
    def __init__(self, records: Sequence[TrajectoryRecord]):
        self.records = sorted(records, key=lambda record: record.index)
        self._counts = [record.error is None and record.finish_reason != "abort" for record in self.records]
        self._scored = [record for record, counts in zip(self.records, self._counts, strict=True) if counts]
        self.rewards = [record.reward + record.overlong_penalty for record in self._scored]
        self.lengths = [max(1, sum(sequence.loss_tokens for sequence in record.sequences)) for record in self._scored]
        self.advantages = [0.0] * len(self._scored)
        self.mean = sum(self.rewards) / len(self.rewards) if self.rewards else 0.0
        self.is_rounding = _is_rounding(self.rewards)
        self.is_equal = len(set(self.rewards)) < 2 or self.is_rounding

    def term(self, name: str) -> list[float]:
        """Return the reward of that name of each trajectory that has one."""
        return [record.reward_metrics[name] for record in self._scored]

    def by_record(self) -> list[float]:
        """Return the advantage of each record, 0 for those without a reward."""
        left = iter(self.advantages)
        return [next(left) if counts else 0.0 for counts in self._counts]


def _is_rounding(values: Sequence[float]) -> bool:
    return 0 < max(values, default=0.0) - min(values, default=0.0) <= EQUAL * max(map(abs, values), default=0.0)


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _normalized(values: Sequence[float], rule: AdvantageRule) -> list[float]:
    mean, scale = sum(values) / len(values), _deviation(values) + 1e-6 if rule.normalizes else 1.0
    return [(value - mean) / scale for value in values]


def _grpo(groups: Sequence[_Group], rule: AdvantageRule) -> None:
    for group in groups:
        group.advantages = _normalized(group.rewards, rule)


def _rloo(groups: Sequence[_Group], _rule: AdvantageRule) -> None:
    for group in groups:
        total, others = sum(group.rewards), len(group.rewards) - 1
        group.advantages = [reward - (total - reward) / others for reward in group.rewards]


def _opo(groups: Sequence[_Group], _rule: AdvantageRule) -> None:
    for group in groups:
        weighted = sum(reward * length for reward, length in zip(group.rewards, group.lengths, strict=True))
        baseline = weighted / sum(group.lengths)
        group.advantages = [0.0 if group.is_equal else reward - baseline for reward in group.rewards]


def _grpo_passk(groups: Sequence[_Group], rule: AdvantageRule) -> None:
    for group in groups:
        first, second, *_ = sorted(group.rewards, reverse=True)
        scale = _deviation(group.rewards) + 1e-6 if rule.normalizes else 1.0
        best = group.rewards.index(first)
        group.advantages = [(first - second) / scale if index == best else 0.0 for index in range(len(group.rewards))]


def _gpg(groups: Sequence[_Group], _rule: AdvantageRule) -> None:
    every = sum(len(group.rewards) for group in groups)
    learning = sum(len(group.rewards) for group in groups if not group.is_equal)
    for group in groups:
        group.advantages = [every / max(learning, 1) * (reward - group.mean) for reward in group.rewards]


def _reinforce_plus_plus_baseline(groups: Sequence[_Group], _rule: AdvantageRule) -> None:
    for group in groups:
        group.advantages = [0.0 if group.is_equal else reward - group.mean for reward in group.rewards]
    _whiten(groups)


def _maxrl(groups: Sequence[_Group], _rule: AdvantageRule) -> None:
    for group in groups:
        if group.mean > 0 and not group.is_equal:
            group.advantages = [reward / group.mean - 1 for reward in group.rewards]


def _gdpo(groups: Sequence[_Group], rule: AdvantageRule) -> None:
    for group in groups:
        for name, weight in rule.weights.items():
            term = group.term(name)
            own = [0.0] * len(term) if len(set(term)) < 2 else _normalized(term, rule)
            group.advantages = [sum_ + weight * value for sum_, value in zip(group.advantages, own, strict=True)]
    _whiten(groups)


def _whiten(groups: Sequence[_Group]) -> None:
    """Whiten the advantages over the tokens of the step, each of which has that of its trajectory."""
    tokens = sum(sum(group.lengths) for group in groups)
    pairs = [pair for group in groups for pair in zip(group.advantages, group.lengths, strict=True)]
    mean = sum(value * length for value, length in pairs) / max(tokens, 1)
    scale = sqrt(sum(length * (value - mean) ** 2 for value, length in pairs) / max(tokens - 1, 1) + 1e-8)
    for group in groups:
        group.advantages = [(value - mean) / scale for value in group.advantages]


ESTIMATORS: dict[str, Callable[[Sequence[_Group], AdvantageRule], None]] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "opo": _opo,
    "grpo_passk": _grpo_passk,
    "gpg": _gpg,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "maxrl": _maxrl,
    "gdpo": _gdpo,
}
