"""Finds replicas that are lost although their process lives: silent, hung, or far slower than the others."""

import statistics
from collections import deque
from dataclasses import dataclass, field

from rollout.progress import ProgressReport

WINDOW = 0.5
"""Share of rollout.replica_timeout_s that a replica must have generated before its speed is judged, however long ago: a
fast replica may stand idle while the trainer waits for a slow one."""
LONGEST_GAP = 0.25
"""Share of rollout.replica_timeout_s that the gap between two observations counts at most. A longer gap says that the
driver itself stood still."""
SLOW_IN_ALL = 2.0
"""A slow replica also has less than 1 / SLOW_IN_ALL of the others' tokens/s in all. Tokens/s per request alone would
condemn a replica with a full batch, and tokens/s in all one with few requests. A GPU that throttles is behind in both:
in all by less, because it keeps its requests for longer and so has more of them than the others."""


@dataclass(frozen=True, slots=True)
class _Interval:
    """Time with requests between two reports, neither of them paused."""

    seconds: float
    tokens: int
    request_seconds: float


@dataclass(slots=True)
class _Watch:
    observed: float
    report: ProgressReport | None = None
    silent_s: float = 0.0
    stuck_s: float = 0.0
    intervals: deque[_Interval] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, of the whole replica and of one of its requests."""

    total: float
    per_request: float


class HealthMonitor:
    """Judges each replica by its progress reports. It has no clock of its own.

    Example, with a timeout of 60 s:
        health.observe("replica-0", 0.0, report) -> None
        health.observe("replica-0", 1.0, None) -> None  # 1 s of silence, and so on every second
        health.observe("replica-0", 60.0, None) -> "no answer for 60 s (rollout.replica_timeout_s=60)"
    """

    def __init__(self, timeout_s: float, slow_factor: float | None):
        """`timeout_s`: rollout.replica_timeout_s. `slow_factor`: rollout.slow_factor; None finds no replica slow."""
        self._timeout_s, self._window_s = timeout_s, WINDOW * timeout_s
        self._slow_factor = slow_factor
        self._watches: dict[str, _Watch] = {}

    def observe(self, name: str, now: float, report: ProgressReport | None) -> str | None:
        """Take in one report, or None when the replica has not answered since the last call. Returns why the replica is
        lost, or None while it is well."""
        watch = self._watches.setdefault(name, _Watch(observed=now))
        elapsed = min(now - watch.observed, LONGEST_GAP * self._timeout_s)
        watch.observed = now
        if report is None:
            watch.silent_s += elapsed
            if watch.silent_s >= self._timeout_s:
                return f"no answer for {watch.silent_s:.0f} s (rollout.replica_timeout_s={self._timeout_s:g})"
            return None
        before, runs = watch.report, report.running > 0 and not report.paused
        is_stuck = runs and before is not None and report.tokens == before.tokens
        watch.stuck_s = watch.stuck_s + elapsed if is_stuck else 0.0
        self._measure(watch, report)
        watch.silent_s, watch.report = 0.0, report
        if watch.stuck_s >= self._timeout_s:
            return (
                f"{report.running} requests ran and no token came for {watch.stuck_s:.0f} s "
                f"(rollout.replica_timeout_s={self._timeout_s:g})"
            )
        return self._slow(name)

    def forget(self, name: str) -> None:
        self._watches.pop(name, None)

    def last(self, name: str) -> ProgressReport | None:
        return self._watches[name].report if name in self._watches else None

    def speed(self, name: str, least_s: float | None = None) -> Speed | None:
        """None when the replica has generated for less than `least_s`, by default the whole window."""
        intervals = self._watches[name].intervals if name in self._watches else ()
        seconds = sum(interval.seconds for interval in intervals)
        if seconds < (self._window_s if least_s is None else least_s) or not seconds:
            return None
        tokens = sum(interval.tokens for interval in intervals)
        return Speed(tokens / seconds, tokens / sum(interval.request_seconds for interval in intervals))

    def _measure(self, watch: _Watch, report: ProgressReport) -> None:
        """Speed is measured over the time that the replica itself counts as busy: a replica that finishes its requests
        between two reports is as fast as it was meanwhile."""
        before = watch.report
        if before is None or before.paused or report.paused or (seconds := report.busy_s - before.busy_s) <= 0:
            return
        interval = _Interval(seconds, report.tokens - before.tokens, report.request_s - before.request_s)
        watch.intervals.append(interval)
        while sum(i.seconds for i in watch.intervals) - watch.intervals[0].seconds >= self._window_s:
            watch.intervals.popleft()

    def _slow(self, name: str) -> str | None:
        own = self.speed(name)
        others = [speed for other in self._watches if other != name if (speed := self.speed(other)) is not None]
        if self._slow_factor is None or own is None or not others:
            return None
        total = statistics.median(speed.total for speed in others)
        per_request = statistics.median(speed.per_request for speed in others)
        if own.per_request * self._slow_factor >= per_request or own.total * SLOW_IN_ALL >= total:
            return None
        return (
            f"{own.per_request:.2g} tokens/s per request, the median of the others is {per_request:.2g} "
            f"(rollout.slow_factor={self._slow_factor:g})"
        )
