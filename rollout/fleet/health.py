"""Watches the replicas of a fleet: asks each for its progress, and reports the loss of one that died, hangs or is slow.

`HealthMonitor` judges by what a replica reports and has no clock of its own. `FleetMonitor` runs one `Supervisor` for
each replica, which asks it, and acts on the judgement.
"""

import asyncio
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from rollout.actors.supervisor import DiedError, Supervisor, UnwellError
from rollout.fleet.fleet import NoProgressError, ReplicaFleet, now
from rollout.progress import ProgressReport
from rollout.replica.lifecycle import Interval, Replica, Speed, Watch

WINDOW = 0.5
"""Share of rollout.replica_timeout_s that a replica must have generated before its speed is judged, however long ago: a
fast replica may stand idle while the trainer waits for a slow one."""
LONGEST_GAP = 0.25
"""Share of rollout.replica_timeout_s that the gap between two observations counts at most. A longer gap says that the
driver itself stood still."""
SILENT = 1 / 3
"""Share of rollout.replica_timeout_s after which weight updates go on without a replica that does not answer: more than
LONGEST_GAP, so that a driver that stood still once takes nobody out."""
SLOW_IN_ALL = 2.0
"""A slow replica also has less than 1 / SLOW_IN_ALL of the others' tokens/s in all. Tokens/s per request alone would
condemn a replica with a full batch, and tokens/s in all one with few requests. A GPU that throttles is behind in both:
in all by less, because it keeps its requests for longer and so has more of them than the others."""

LARGE, TYPICAL_S = 32, 1.0
"""The number of others from which on one more or less does not move their median, and the seconds between two times
that it is taken then."""


class HealthMonitor:
    """Judges each replica by its progress reports, which it keeps in `Replica.watch`.

    Example, with a timeout of 60 s:
        health.observe(replica, 0.0, report) -> None
        health.observe(replica, 1.0, None) -> None  # 1 s of silence, and so on every second
        health.observe(replica, 60.0, None) -> "no answer for 60 s (rollout.replica_timeout_s=60)"
    """

    def __init__(self, timeout_s: float, slow_factor: float | None):
        """`timeout_s`: rollout.replica_timeout_s. `slow_factor`: rollout.slow_factor; None finds no replica slow."""
        self._timeout_s, self._window_s = timeout_s, WINDOW * timeout_s
        self._slow_factor = slow_factor
        self._typical: Speed | None = None
        self._is_typical_at = math.inf  # from when on `_typical` is everybody's

    def observe(
        self, replica: Replica, now: float, report: ProgressReport | None, others: Iterable[Replica] = ()
    ) -> str | None:
        """Take in one report, or None when the replica has not answered since the last call. Returns why the replica is
        lost, or None while it is well. `others`: the replicas to whose speed its own is compared."""
        watch = replica.watch = replica.watch or Watch(observed=now)
        elapsed = min(now - watch.observed, LONGEST_GAP * self._timeout_s)
        watch.observed = now
        if report is None:
            watch.silent_s += elapsed
            text = f"no answer for {watch.silent_s:.0f} s (rollout.replica_timeout_s={self._timeout_s:g})"
            watch.silence = text if watch.silent_s >= SILENT * self._timeout_s else None
            return text if watch.silent_s >= self._timeout_s else None
        before, runs = watch.report, report.running > 0 and not report.paused
        is_stuck = runs and before is not None and report.tokens == before.tokens
        watch.stuck_s = watch.stuck_s + elapsed if is_stuck else 0.0
        self._measure(watch, report)
        watch.silent_s, watch.silence, watch.report = 0.0, None, report
        if watch.stuck_s >= self._timeout_s:
            return (
                f"{report.running} requests ran and no token came for {watch.stuck_s:.0f} s "
                f"(rollout.replica_timeout_s={self._timeout_s:g})"
            )
        return self._find_slow(replica, now, others)

    def _measure(self, watch: Watch, report: ProgressReport) -> None:
        """Add the time since the last report. Speed is measured over the time that the replica itself counts as busy:
        a replica that finishes its requests between two reports is as fast as it was meanwhile."""
        before = watch.report
        if before is None or before.paused or report.paused or (seconds := report.busy_s - before.busy_s) <= 0:
            return
        interval = Interval(seconds, report.tokens - before.tokens, report.request_s - before.request_s)
        watch.measure(interval, self._window_s)

    def _find_slow(self, replica: Replica, now: float, others: Iterable[Replica]) -> str | None:
        watch = replica.watch
        if self._slow_factor is None or watch is None or not watch.is_measured or (own := watch.speed) is None:
            return None
        if not self._is_typical_at <= now < self._is_typical_at + TYPICAL_S:
            self._take_typical(replica, now, others)
        if (typical := self._typical) is None:
            return None
        total, per_request = typical.total, typical.per_request
        if own.per_request * self._slow_factor >= per_request or own.total * SLOW_IN_ALL >= total:
            return None
        return (
            f"{own.per_request:.2g} tokens/s per request, the median of the others is {per_request:.2g} "
            f"(rollout.slow_factor={self._slow_factor:g})"
        )

    def _take_typical(self, replica: Replica, now: float, others: Iterable[Replica]) -> None:
        """Take the medians of the others' speeds. In a large fleet they are everybody's for a while: comparing each
        replica with each costs the square of their number."""
        speeds = [
            other.watch.speed
            for other in others
            if other is not replica and other.watch is not None and other.watch.is_measured and other.watch.speed
        ]
        self._typical = None
        if speeds:
            total = statistics.median(speed.total for speed in speeds)
            self._typical = Speed(total, statistics.median(speed.per_request for speed in speeds))
        self._is_typical_at = now if len(speeds) >= LARGE else math.inf


@dataclass
class FleetMonitor:
    """Supervises every replica: a question every `interval_s`, while it also waits for the replica's death.

    Example: fleet.take_progress -> health.observe -> "no answer for 60 s" -> fleet.lose
    """

    fleet: ReplicaFleet
    health: HealthMonitor
    interval_s: float
    """The seconds between two questions: rollout.progress_interval_s."""

    async def run(self) -> None:
        """Watch until cancelled. Raises TooFewReplicasError when a loss leaves too few replicas."""
        watched: set[str] = set()
        async with asyncio.TaskGroup() as watches:
            while True:
                for handle in self.fleet.running:
                    if handle.name not in watched:
                        watched.add(handle.name)
                        replica = self.fleet.replicas[handle.name]
                        watches.create_task(self._watch(replica), name=f"watch-{replica.name}")
                await asyncio.sleep(self.interval_s)

    async def _watch(self, replica: Replica) -> None:
        """Return when the replica has left the fleet."""
        assert replica.handle is not None
        supervisor = Supervisor[ProgressReport](
            ask=lambda: self.fleet.take_progress(replica),
            judge=lambda report: self.health.observe(replica, now(), report, self.fleet.replicas.values()),
            interval_s=self.interval_s,
            on_lost=lambda error: self._lose(replica, error),
            died=replica.handle.wait_dead,
        )
        try:
            await supervisor.run()
        finally:
            replica.watch = None

    async def _lose(self, replica: Replica, error: Exception) -> None:
        """Report the loss, unless the replica has left the fleet already and died of that: the run had allowed it to
        go, and must not end because another one is out of service at this moment."""
        if replica.is_dead:
            return
        match error:
            case UnwellError():
                why = f"is lost: {error}"
            case DiedError():
                why = f"died: {error}"
            case NoProgressError():
                why = f"died: {error.__cause__}"
            case _:  # an error of the driver itself says nothing about the replica
                raise error
        log = f"its log is logs/{replica.name}.log in the run folder"
        await self.fleet.lose(replica.name, RuntimeError(f"{replica.name} {why}; {log}"))
