"""Arithmetic on the arrival times of a request's tokens, in seconds of one clock."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

Interval = tuple[float, float]
MIN_GAPS = 4
"""Fewer undisturbed gaps do not make a median."""


def normal_gap(times: Sequence[float], undisturbed: Sequence[Interval]) -> float:
    """Median of the gaps between neighbouring tokens that lie within one of the intervals. Raises ValueError for fewer
    than MIN_GAPS."""
    gaps = [
        end - start
        for start, end in pairwise(times)
        if any(first <= start and end <= last for first, last in undisturbed)
    ]
    if len(gaps) < MIN_GAPS:
        raise ValueError(f"{len(gaps)} gaps between tokens lie within {list(undisturbed)}: at least {MIN_GAPS} needed")
    return median(gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseWindow:
    """What one update adds to the gap between two streamed tokens: stop + swap + go, in seconds."""

    stop_s: float
    """From the last token of the old weights to the begin of the swap, while the engine stops."""
    swap_s: float
    """Until workers and engine have the new version; without staging it includes the transfer."""
    go_s: float
    """From the end of the swap to the first token of the new weights, less a normal gap."""
    normal_s: float
    """The normal gap. A pause shorter than its noise cannot be measured."""

    @property
    def seconds(self) -> float:
        return self.stop_s + self.swap_s + self.go_s


def pause_window(
    times: Sequence[float], first_new: int, swap: Interval, undisturbed: Sequence[Interval]
) -> PauseWindow:
    """Split one pause into its parts.

    Args:
        first_new: index of the first token that the new weights sampled.
        swap: when the workers were asked to swap, and when they had answered.
    """
    if not 0 < first_new < len(times):
        raise ValueError(f"first_new={first_new}: no token before or after it, there are {len(times)}")
    normal_s = normal_gap(times, undisturbed)
    return PauseWindow(
        stop_s=swap[0] - times[first_new - 1],
        swap_s=swap[1] - swap[0],
        go_s=times[first_new] - swap[1] - normal_s,
        normal_s=normal_s,
    )


def median_window(windows: Sequence[PauseWindow]) -> PauseWindow:
    """Median of each part."""
    return PauseWindow(
        stop_s=median(window.stop_s for window in windows),
        swap_s=median(window.swap_s for window in windows),
        go_s=median(window.go_s for window in windows),
        normal_s=median(window.normal_s for window in windows),
    )


def tokens_within(streams: Sequence[Sequence[float]], interval: Interval) -> int:
    """Count the tokens of all streams that arrived in [start, end)."""
    return sum(interval[0] <= time < interval[1] for times in streams for time in times)


def growth(seconds: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Replicas -> (time over the time of the fewest, the logarithmic bound: 1 + log2(replicas / fewest))."""
    fewest = min(seconds)
    return {count: (value / seconds[fewest], 1 + math.log2(count / fewest)) for count, value in seconds.items()}


def slope(values: Mapping[int, float]) -> float:
    """Growth of the value per replica, from the fewest to the most."""
    fewest, most = min(values), max(values)
    return (values[most] - values[fewest]) / (most - fewest)
