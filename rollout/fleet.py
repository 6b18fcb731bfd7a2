"""The replicas as one: pause and resume over all of them, and their counters."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from configs.deadline import within
from configs.schema import PauseMode
from rollout.fleet_member import FleetMember
from rollout.members import FleetMembers
from rollout.progress import Progress
from rollout.replica import ReplicaStatus
from rollout.router import ReplicaRouter

logger = logging.getLogger(__name__)
PAUSE_TIMEOUT_S = 60.0
STATS_TIMEOUT_S = 30.0
GAUGES_TIMEOUT_S = 2.0
"""Metrics of a step are not worth waiting for a replica that hangs."""


class FleetPauseError(RuntimeError):
    """Some replicas could not be paused or resumed. `errors`: replica -> why. The others are as they were before."""

    def __init__(self, what: str, errors: dict[str, BaseException]):
        super().__init__(f"{what} failed on " + "; ".join(f"{name}: {error!r}" for name, error in errors.items()))
        self.errors = errors


class ReplicaFleet(FleetMembers):
    """Its members, see rollout.members, and what is done to all of them at once."""

    def __init__(  # noqa: PLR0913
        self,
        replicas: Sequence[FleetMember],
        router: ReplicaRouter,
        min_replicas: int,
        report: Callable[[str], None],
        *,
        serving: int | None = None,
        max_replacements: int = 0,
        progress: Progress | None = None,
    ):
        super().__init__(
            replicas,
            router,
            min_replicas,
            report,
            serving=serving,
            max_replacements=max_replacements,
            progress=progress,
        )
        self._mode: PauseMode | None = None  # of the pause that a client ordered last, until it resumes
        self._last_stats: dict[str, dict[str, float]] = {}
        self._last_time = time.monotonic()
        self._last_busy_s = 0.0

    # -- control -------------------------------------------------------------------------------------------------------

    async def join(self, replica: FleetMember) -> bool:
        """Its engine runs. In a paused fleet it is paused too. False when it is not wanted any more. Raises
        FleetPauseError."""
        if not self.joined(replica):
            return False
        if (mode := self._mode) is not None:
            what = f"pause({mode.value})"
            if errors := await self._on_all(lambda r: r.pause(mode), PAUSE_TIMEOUT_S, what, [replica]):
                raise FleetPauseError(what, errors)
        return True

    async def pause(self, mode: PauseMode, clear_cache: bool = False, timeout_s: float = PAUSE_TIMEOUT_S) -> None:
        """Returns when every replica is paused. Raises FleetPauseError when one is not: then those that were not paused
        before are resumed."""
        modes: dict[str, str | None] = {status.name: status.pause_mode for status in await self.statuses()}
        before, self._mode = self._mode, mode  # from here on, who joins is paused too
        errors = await self._on_all(lambda r: r.pause(mode, clear_cache), timeout_s, f"pause({mode.value})")
        if errors:
            self._mode = before
            undo = [r for r in self.running if r.name not in errors and modes.get(r.name, before) is None]
            errors |= await self._on_all(lambda r: r.resume(), timeout_s, "resume", undo)
            raise FleetPauseError(f"pause({mode.value})", errors)

    async def resume(self, timeout_s: float = PAUSE_TIMEOUT_S) -> None:
        """Returns when every replica goes on. Raises FleetPauseError; the others do go on."""
        self._mode = None
        errors = await self._on_all(lambda r: r.resume(), timeout_s, "resume")
        if errors:
            raise FleetPauseError("resume", errors)

    async def abort(self, request_ids: Collection[str] | None = None, timeout_s: float = PAUSE_TIMEOUT_S) -> list[str]:
        """End these requests wherever they are; None is all. Returns those that there were."""
        async with within(timeout_s, "timeout_s", "abort"):
            answers = await asyncio.gather(*(replica.abort(request_ids) for replica in self.running))
        return [name for ended in answers for name in ended]

    async def is_paused(self) -> bool:
        """Raises FleetPauseError when some are and others are not."""
        paused = {status.name: status.pause_mode is not None or status.torn for status in await self.statuses()}
        if len(set(paused.values())) > 1:
            raise FleetPauseError("is_paused", {name: RuntimeError("paused") for name, is_ in paused.items() if is_})
        return all(paused.values())

    async def statuses(self) -> list[ReplicaStatus]:
        """Of every replica that runs: the version it serves, and whether it is paused."""
        async with within(STATS_TIMEOUT_S, "STATS_TIMEOUT_S", "reading the replicas' state"):
            return await asyncio.gather(*(replica.status() for replica in self.running))

    async def _on_all(
        self,
        call: Callable[[FleetMember], Awaitable[Any]],
        timeout_s: float,
        what: str,
        replicas: Sequence[FleetMember] | None = None,
    ) -> dict[str, BaseException]:
        """Replica -> error of those on which it failed."""

        async def one(replica: FleetMember) -> None:
            async with within(timeout_s, "timeout_s", f"{what} on {replica.name}"):
                await call(replica)

        chosen = self.running if replicas is None else replicas
        results = await asyncio.gather(*(one(replica) for replica in chosen), return_exceptions=True)
        return {r.name: error for r, error in zip(chosen, results, strict=True) if error is not None}

    # -- counters ------------------------------------------------------------------------------------------------------

    async def totals(self, timeout_s: float = STATS_TIMEOUT_S) -> dict[str, float]:
        """The replicas' counters since their start, summed; of those that died, or do not answer in time, what they
        said last."""

        async def one(replica: FleetMember) -> None:
            async with asyncio.timeout(timeout_s):
                self._last_stats[replica.name] = await replica.stats()

        answers = await asyncio.gather(*(one(replica) for replica in self.running), return_exceptions=True)
        for error in filter(None, answers):  # who is lost is the monitor's to tell
            logger.info("counters as they were last: %r", error)
        totals: defaultdict[str, float] = defaultdict(float)
        for stats in self._last_stats.values():
            for key, value in stats.items():
                totals[key] += value
        return totals

    async def gauges(self) -> dict[str, float]:
        """Metrics since the last call."""
        totals = await self.totals(GAUGES_TIMEOUT_S)
        now = time.monotonic()
        busy_s = totals["busy_s"] - self._last_busy_s
        idle = 1 - busy_s / ((now - self._last_time) * max(1, len(self.running)))
        self._last_time, self._last_busy_s = now, totals["busy_s"]
        return {
            **self._router.gauges(),
            **self.member_gauges(),
            "perf/replica_idle": max(0.0, idle),
            "rollout/engine_requests": totals["engine_requests"],
            "rollout/aborted": totals["aborted"],
            "rollout/continued": totals["continued"],
            "rollout/prefix_hit_rate": totals["cached_tokens"] / max(1.0, totals["prompt_tokens"]),
        }
