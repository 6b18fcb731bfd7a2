"""Count how much of some intervals lies in others, and fit what slows what. Arrays in, arrays out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEAST = 1.05
"""The smallest factor that counts as slowed."""


class Load:
    """Counts how many of some intervals are open, over time.

    Example: Load([0, 1], [4, 2]).mean([0], [2]) == [1.5]
    """

    def __init__(self, starts: Sequence[float] | Floats, ends: Sequence[float] | Floats):
        times = np.concatenate([np.asarray(starts, float), np.asarray(ends, float)])
        steps = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
        order = np.argsort(times, kind="stable")
        self._times, self._counts = times[order], np.cumsum(steps[order])

    def sum(self, starts: Any, ends: Any) -> Floats:
        """Return the open intervals times seconds, between each start and end."""
        return self._integral(self._counts, starts, ends)

    def _integral(self, heights: Floats, starts: Any, ends: Any) -> Floats:
        """Integrate the `heights`, each from one time to the next, between each start and end."""
        if not len(self._times):
            return np.zeros(len(np.asarray(starts)))
        sums = np.concatenate([[0.0], np.cumsum(heights[:-1] * np.diff(self._times))])
        return np.interp(ends, self._times, sums) - np.interp(starts, self._times, sums)

    def mean(self, starts: Any, ends: Any) -> Floats:
        """Return the number of open intervals, on average between each start and end."""
        seconds = np.maximum(np.asarray(ends, float) - np.asarray(starts, float), 1e-12)
        return self.sum(starts, ends) / seconds

    def mean_over_steps(self, starts: Any, ends: Any, base: float, per_open: float) -> Floats:
        """Return the mean over steps, each of which takes base + per_open * count: a long step counts once."""
        pace = 1 / np.maximum(base + per_open * self._counts, 1e-12)
        steps = np.maximum(self._integral(pace, starts, ends), 1e-12)
        return self._integral(self._counts * pace, starts, ends) / steps


def union(starts: Sequence[float], ends: Sequence[float]) -> Load:
    """Return a load of 0 or 1: whether at least one of the intervals is open."""
    merged: list[list[float]] = []
    for start, end in sorted(zip(starts, ends, strict=True)):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return Load([start for start, _ in merged], [end for _, end in merged])


def nonnegative(columns: Floats, values: Floats) -> tuple[Floats, float]:
    """Solve least squares without negative coefficients, for a few columns: [n, k], [n] -> [k], and the squared error.

    Every subset of the columns is tried, which for three of them is the shortest way.
    """
    count = columns.shape[1]
    best, least = np.zeros(count), float(values @ values)
    for subset in range(1, 1 << count):
        chosen = [index for index in range(count) if subset >> index & 1]
        solution, *_ = np.linalg.lstsq(columns[:, chosen], values, rcond=None)
        if (solution < 0).any():
            continue
        error = float(((columns[:, chosen] @ solution - values) ** 2).sum())
        if error < least * (1 - 1e-9):
            best, least = np.zeros(count), error
            best[chosen] = solution
    return best, least


def slowed(columns: Floats, values: Floats, shares: Floats, most: float = 6.0) -> tuple[Floats, float]:
    """Fit values = (columns @ b) * (1 + (factor - 1) * shares). Return b, none negative, and the factor, at least 1.

    [n, k], [n], [n] -> [k], factor. `shares` are those of each value's time in which something slowed it.
    """

    def error(factor: float) -> float:
        return nonnegative(columns * (1 + (factor - 1) * shares)[:, None], values)[1]

    grid = np.linspace(1.0, most, 26)
    errors = [error(factor) for factor in grid]
    index = int(np.argmin(errors))
    low, high = grid[max(0, index - 1)], grid[min(len(grid) - 1, index + 1)]
    ratio = (5**0.5 - 1) / 2
    for _ in range(20):  # golden section
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if error(left) <= error(right):
            high = right
        else:
            low = left
    factor = (low + high) / 2
    factor = factor if factor >= LEAST else 1.0
    return nonnegative(columns * (1 + (factor - 1) * shares)[:, None], values)[0], float(factor)
