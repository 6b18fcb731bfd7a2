"""Typed metrics: how two values of one key are reduced is a property of their type, never of the key's spelling.

Train workers return `dict[str, Metric]`, the driver merges the parts of a step with `merge_metrics`, and the sinks get
plain floats from `to_floats`. NaN is contagious in every reduction, so a broken loss cannot hide behind a `Max`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


class Metric(Protocol):
    @property
    def value(self) -> float:
        """The reduced value."""
        ...

    def merge(self, other: Any) -> Metric:
        """Return the metric of both parts together; neither part changes."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean; NaN of nothing. Example: a loss summed over 512 tokens is `Mean(total=loss_sum, count=512)`."""

    total: float
    """Sum of the observations (times their weights)."""
    count: float
    """Number of observations (or sum of the weights)."""

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class EffectiveSampleSize:
    """The effective sample size of n importance weights w, relative to n: (sum w)^2 / (n sum w^2), in (0, 1]."""

    total: float
    total_squared: float
    """Sum of w^2."""
    count: float

    @property
    def value(self) -> float:
        """NaN when nothing was observed, or every weight is 0."""
        divisor = self.count * self.total_squared
        return self.total**2 / divisor if divisor else math.nan

    def merge(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        return EffectiveSampleSize(
            self.total + other.total, self.total_squared + other.total_squared, self.count + other.count
        )


@dataclass(frozen=True, slots=True)
class Sum:
    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    value: float

    def merge(self, other: Max) -> Max:
        return self if math.isnan(self.value) or self.value >= other.value else other


@dataclass(frozen=True, slots=True)
class Last:
    """The latest observation, for example a learning rate."""

    value: float

    def merge(self, other: Last) -> Last:
        return other


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge parts in order, key by key; a key may be missing from some parts, but has one type."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            merged[key] = merged[key].merge(metric) if key in merged else metric
    return merged


def over_optimizer_steps(steps: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge a rank's metrics of the optimizer steps of one batch: of sums, such as losses, the mean over the steps."""
    return {
        key: Sum(metric.value / len(steps)) if isinstance(metric, Sum) else metric
        for key, metric in merge_metrics(steps).items()
    }


def to_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the reduced values, as sinks take them."""
    return {key: float(metric.value) for key, metric in metrics.items()}


@contextmanager
def timed(metrics: dict[str, float], key: str) -> Iterator[None]:
    """Add the seconds spent in the block to `timing_s/<key>`."""
    start = time.perf_counter()
    yield
    name = f"timing_s/{key}"
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start
