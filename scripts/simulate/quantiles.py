"""A distribution by its quantiles, its tail included."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

PROBABILITIES = (*(step / 100 for step in range(100)), 0.995, 0.999, 1.0)
"""The probabilities of the values of a distribution, closer in the tail, because a step waits for it."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution as ascending values at `PROBABILITIES`; a single value is a constant.

    Example: Quantiles.of([3, 5, 5, 80]).at(0.5) == 5.0
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError."""
        if len(self.values) not in (1, len(PROBABILITIES)):
            raise ValueError(f"{len(self.values)} quantiles: must be 1 or {len(PROBABILITIES)}")
        if not all(math.isfinite(value) and value >= 0 for value in self.values):
            raise ValueError("quantiles must be finite, and 0 or more")
        if list(self.values) != sorted(self.values):
            raise ValueError("quantiles must ascend")

    @classmethod
    def of(cls, sample: Sequence[float]) -> "Quantiles":
        """Return the quantiles of a sample. Raises ValueError if it is empty."""
        if not len(sample):
            raise ValueError("no quantiles of an empty sample")
        quantiles = np.quantile(np.asarray(sample, float), PROBABILITIES)
        if quantiles[0] == quantiles[-1]:
            return cls((float(quantiles[0]),))
        return cls(tuple(float(f"{value:.6g}") for value in quantiles))

    @classmethod
    def lognormal(cls, mean: float, sigma: float, cap: float) -> "Quantiles":
        """Return a log-normal distribution cut off at `cap`. `mean` is before the cut, `sigma` of the logarithm."""
        inner = [_NORMAL.inv_cdf(min(max(p, 1e-4), 1 - 1e-4)) for p in PROBABILITIES]
        return cls(tuple(min(cap, mean * math.exp(sigma * z - sigma**2 / 2)) for z in inner))

    def at(self, probability: float) -> float:
        if len(self.values) == 1:
            return self.values[0]
        return float(np.interp(probability, PROBABILITIES, self.values))

    def at_normal(self, z: float) -> float:
        """Return the value at the probability of a standard normal variable."""
        return self.at(_NORMAL.cdf(z))

    @property
    def mean(self) -> float:
        if len(self.values) == 1:
            return self.values[0]
        return float(np.trapezoid(self.values, PROBABILITIES))


def alike_in_groups(groups: Sequence[Sequence[float]]) -> float:
    """Return the likeness of the values of a group, between 0 and 1: the intraclass correlation of their normal scores.

    It is 0 for groups of one, and for values that are all equal.
    """
    values = np.array([value for group in groups for value in group], float)
    if len(values) < 3 or values.min() == values.max() or all(len(group) < 2 for group in groups):
        return 0.0
    ordered = np.sort(values)
    ranks = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2
    scores = np.array([_NORMAL.inv_cdf(rank / len(values)) for rank in np.clip(ranks, 0.5, len(values) - 0.5)])
    within, pairs, start = 0.0, 0, 0
    for group in groups:
        some = scores[start : start + len(group)]
        start += len(group)
        if len(some) > 1:
            within += float(((some - some.mean()) ** 2).sum())
            pairs += len(some) - 1
    return min(1.0, max(0.0, 1 - within / pairs / float(scores.var())))
