"""Typed metrics: how two values of one key are reduced is a property of their type, never of the key's spelling.

Train workers return `dict[str, Metric]`, the driver merges the parts of a step with `merge_metrics`, and the sinks get
plain floats from `to_floats`. NaN is contagious in every reduction, so a broken loss cannot hide behind a `Max`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self


class Metric(Protocol):
    """The interface of all metrics below."""

    @property
    def value(self) -> float:
        """The reduced value."""
        ...

    def merge(self, other: Self) -> Self:
        """Return the metric of both parts together; neither part changes."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean. Example: a loss summed over 512 tokens is `Mean(total=loss_sum, count=512)`."""

    total: float
    """Sum of the observations (times their weights)."""
    count: float
    """Number of observations (or sum of the weights)."""

    @property
    def value(self) -> float:
        """`total / count`; NaN when nothing was observed."""
        return self.total / self.count if self.count else math.nan

    def merge(self, other: Mean) -> Mean:
        """Return the mean over both sets of observations."""
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class EffectiveSampleSize:
    """The effective sample size of n importance weights w, relative to n: (sum w)^2 / (n sum w^2), in (0, 1]."""

    total: float
    """Sum of w."""
    total_squared: float
    """Sum of w^2."""
    count: float
    """Number of weights, n."""

    @property
    def value(self) -> float:
        """NaN when nothing was observed, or every weight is 0."""
        divisor = self.count * self.total_squared
        return self.total**2 / divisor if divisor else math.nan

    def merge(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        """Return the effective sample size of both sets of weights together."""
        return EffectiveSampleSize(
            self.total + other.total, self.total_squared + other.total_squared, self.count + other.count
        )


@dataclass(frozen=True, slots=True)
class Sum:
    """A total, for example tokens trained or seconds spent."""

    value: float

    def merge(self, other: Sum) -> Sum:
        """Return the sum of both."""
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest observation; NaN wins."""

    value: float

    def merge(self, other: Max) -> Max:
        """Return the larger of both."""
        return self if math.isnan(self.value) or self.value >= other.value else other


@dataclass(frozen=True, slots=True)
class Last:
    """The latest observation, for example a learning rate or a queue length."""

    value: float

    def merge(self, other: Last) -> Last:
        """Return `other`, which came later."""
        return other


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge parts in order, key by key; a key may be missing from some parts.

    Raises:
        TypeError: one key has two metric types.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            if key not in merged:
                merged[key] = metric
                continue
            kept = merged[key]
            if type(kept) is not type(metric):
                raise TypeError(f"metric {key!r} is both {type(kept).__name__} and {type(metric).__name__}")
            merged[key] = kept.merge(metric)
    return merged


def to_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the reduced value of every metric, as the sinks want them."""
    return {key: float(metric.value) for key, metric in metrics.items()}


@contextmanager
def timed(metrics: dict[str, Metric], key: str) -> Iterator[None]:
    """Add the seconds spent in the block to the `Sum` under `timing_s/<key>`, also when the block raises.

    Raises:
        TypeError: `timing_s/<key>` is already there and is no `Sum`.
    """
    start = time.perf_counter()
    try:
        yield
    finally:
        name = f"timing_s/{key}"
        before = {name: metrics[name]} if name in metrics else {}
        metrics.update(merge_metrics([before, {name: Sum(time.perf_counter() - start)}]))
