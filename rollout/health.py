"""Which replica is lost though its process lives: silent, hung, or far slower than the others. No clock of its own."""

import statistics
from collections import deque
from dataclasses import dataclass, field

from rollout.progress import ProgressReport

WINDOW_S = 30.0
"""Speed is measured over so long a time, at least half of which the replica must have been generating."""
LONGEST_GAP = 0.25
"""Of the deadline: who observes may have stood still himself, and a longer gap between two observations counts as
so much. A replica is judged after four of them at the earliest."""


@dataclass(frozen=True, slots=True)
class _Interval:
    """Between two reports in which requests ran and nothing was paused."""

    end: float
    seconds: float
    tokens: int
    request_seconds: float


@dataclass(slots=True)
class _Watch:
    """What is known of one replica."""

    observed: float
    report: ProgressReport | None = None
    reported: float = 0.0
    silent_s: float = 0.0
    stuck_s: float = 0.0
    intervals: deque[_Interval] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, of the whole replica and of one of its requests."""

    total: float
    per_request: float


class HealthMonitor:
    """`timeout_s`: rollout.replica_timeout_s. `slow_factor`: rollout.slow_factor; None finds nothing slow."""

    def __init__(self, timeout_s: float, slow_factor: float | None):
        self._timeout_s = timeout_s
        self._slow_factor = slow_factor
        self._watches: dict[str, _Watch] = {}

    def observe(self, name: str, now: float, report: ProgressReport | None) -> str | None:
        """To be called regularly. `report` None: no answer since the last one. Returns why the replica is to be given
        up, None while it is well. `now`: seconds of any clock that never goes back."""
        watch = self._watches.setdefault(name, _Watch(observed=now))
        elapsed = min(now - watch.observed, LONGEST_GAP * self._timeout_s)
        watch.observed = now
        if report is None:
            watch.silent_s += elapsed
            if watch.silent_s >= self._timeout_s:
                return f"no answer for {watch.silent_s:.0f} s (rollout.replica_timeout_s={self._timeout_s:g})"
            return None
        is_stuck = _runs(report) and watch.report is not None and report.tokens == watch.report.tokens
        watch.stuck_s = watch.stuck_s + elapsed if is_stuck else 0.0
        self._measure(watch, now, report)
        watch.silent_s, watch.report, watch.reported = 0.0, report, now
        if watch.stuck_s >= self._timeout_s:
            return (
                f"{report.running} requests ran and no token came for {watch.stuck_s:.0f} s "
                f"(rollout.replica_timeout_s={self._timeout_s:g})"
            )
        return self._slow(name, now)

    def forget(self, name: str) -> None:
        self._watches.pop(name, None)

    def last(self, name: str) -> ProgressReport | None:
        return self._watches[name].report if name in self._watches else None

    def speed(self, name: str, now: float, least_s: float = WINDOW_S / 2) -> Speed | None:
        """Over the last WINDOW_S; None when it generated for less than `least_s` of it."""
        if name not in self._watches:
            return None
        intervals = [i for i in self._watches[name].intervals if i.end - i.seconds >= now - WINDOW_S]
        seconds = sum(interval.seconds for interval in intervals)
        if seconds < least_s:
            return None
        tokens = sum(interval.tokens for interval in intervals)
        return Speed(tokens / seconds, tokens / sum(interval.request_seconds for interval in intervals))

    def _measure(self, watch: _Watch, now: float, report: ProgressReport) -> None:
        before = watch.report
        if before is not None and _runs(before) and _runs(report) and now > watch.reported:
            seconds = now - watch.reported
            running = (before.running + report.running) / 2
            watch.intervals.append(_Interval(now, seconds, report.tokens - before.tokens, running * seconds))
        while watch.intervals and watch.intervals[0].end < now - WINDOW_S:
            watch.intervals.popleft()

    def _slow(self, name: str, now: float) -> str | None:
        """Both by replica and by request: a replica with few requests has few tokens, one with many has slow ones."""
        own = self.speed(name, now)
        others = [speed for other in self._watches if other != name if (speed := self.speed(other, now)) is not None]
        if self._slow_factor is None or own is None or not others:
            return None
        total = statistics.median(speed.total for speed in others)
        per_request = statistics.median(speed.per_request for speed in others)
        if own.total * self._slow_factor >= total or own.per_request * self._slow_factor >= per_request:
            return None
        return (
            f"{own.per_request:.2g} tokens/s per request, the median of the others is {per_request:.2g} "
            f"(rollout.slow_factor={self._slow_factor:g})"
        )


def _runs(report: ProgressReport) -> bool:
    return report.running > 0 and not report.paused
