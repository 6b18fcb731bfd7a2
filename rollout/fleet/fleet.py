"""The replicas as one: pause and resume over all of them, and their counters."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from configs.runtime.deadline import within
from configs.schema import PauseMode
from rollout.fleet.member import FleetMember
from rollout.fleet.members import FleetMembers
from rollout.progress import Progress
from rollout.replica.pause import PauseInterruptedError
from rollout.replica.replica import ReplicaStatus
from rollout.router import ReplicaRouter

logger = logging.getLogger(__name__)
PAUSE_TIMEOUT_S = 60.0
STATS_TIMEOUT_S = 30.0
STATUS_TIMEOUT_S = 5.0
GAUGES_TIMEOUT_S = 2.0
"""Metrics of a step are not worth waiting for a replica that hangs."""


class FleetPauseError(RuntimeError):
    """Some replicas could not be paused, resumed or asked. `errors`: replica -> why."""

    def __init__(self, what: str, errors: dict[str, BaseException]):
        super().__init__(f"{what} failed on " + "; ".join(f"{name}: {error!r}" for name, error in errors.items()))
        self.errors = errors


class ReplicaFleet(FleetMembers):
    """Its members, see rollout.fleet.members, and what is done to all of them at once."""

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
        self._num_orders = 0
        self._before: tuple[PauseMode | None, dict[str, str | None]] | None = None
        """What a pause that fails goes back to, of the fleet and of each replica: as it was before any of the pauses
        that are under way."""
        self._late: set[asyncio.Task[Any]] = set()
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
            pause = self._on_all(lambda r: r.pause(mode), PAUSE_TIMEOUT_S, what, [replica], key="PAUSE_TIMEOUT_S")
            if errors := await pause:
                raise FleetPauseError(what, errors)
        return True

    async def pause(self, mode: PauseMode, clear_cache: bool = False, timeout_s: float = PAUSE_TIMEOUT_S) -> None:
        """Returns when every replica is paused. Raises FleetPauseError when one is not: then those that were not paused
        before are resumed, unless another order came meanwhile, which stands."""
        before, modes = self._before = self._before or (self._mode, {})
        order = self._order(mode)  # from here on, who joins is paused too

        async def pause(replica: FleetMember) -> None:
            modes.setdefault(replica.name, (await replica.status()).pause_mode)
            if order != self._num_orders:
                raise PauseInterruptedError("another order came before this one had reached the replica")
            await replica.pause(mode, clear_cache)

        errors = await self._on_all(pause, timeout_s, f"pause({mode.value})")
        if order == self._num_orders:
            self._before = None
        if errors and order == self._num_orders:
            self._mode = before
            undo = [r for r in self.running if modes.get(r.name, before) is None]
            self._resume_late([r for r in undo if isinstance(errors.get(r.name), TimeoutError)])
            undo = [r for r in undo if r.name not in errors]
            errors |= await self._on_all(lambda r: r.resume(), timeout_s, "resume", undo)
        if errors:
            raise FleetPauseError(f"pause({mode.value})", errors)

    def _resume_late(self, replicas: Sequence[FleetMember]) -> None:
        """Their pauses were cancelled, and yet may have come to be complete. Nobody waits: they do not answer."""
        task = asyncio.create_task(self._on_all(lambda r: r.resume(), PAUSE_TIMEOUT_S, "resume", replicas))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def _order(self, mode: PauseMode | None) -> int:
        self._mode = mode
        self._num_orders += 1
        return self._num_orders

    async def resume(self, timeout_s: float = PAUSE_TIMEOUT_S) -> None:
        """Returns when every replica goes on. Raises FleetPauseError; the others do go on."""
        self._order(None)
        self._before = None
        errors = await self._on_all(lambda r: r.resume(), timeout_s, "resume")
        if errors:
            raise FleetPauseError("resume", errors)

    async def abort(self, request_ids: Collection[str] | None = None, timeout_s: float = PAUSE_TIMEOUT_S) -> list[str]:
        """End these requests wherever they are; None is all. Returns those that there were. Raises FleetPauseError; on
        the others they have ended."""
        ended: list[str] = []

        async def abort(replica: FleetMember) -> None:
            ended.extend(await replica.abort(request_ids))

        if errors := await self._on_all(abort, timeout_s, "abort"):
            raise FleetPauseError(f"abort, which ended {len(ended)} requests elsewhere,", errors)
        return ended

    async def is_paused(self) -> bool:
        """Raises FleetPauseError when some are and others are not, or do not say. An empty fleet is what it was told to
        be."""
        statuses, errors = await self._statuses()
        if errors:
            raise FleetPauseError("is_paused", errors)
        paused = {status.name: status.pause_mode is not None or status.torn for status in statuses}
        if len(set(paused.values())) > 1:
            raise FleetPauseError("is_paused", {name: RuntimeError("paused") for name, is_ in paused.items() if is_})
        return all(paused.values()) if paused else self._mode is not None

    async def statuses(self) -> list[ReplicaStatus]:
        """The version that each replica serves, and whether it is paused; of those that answer. Who does not is the
        monitor's to tell."""
        return (await self._statuses())[0]

    async def _statuses(self) -> tuple[list[ReplicaStatus], dict[str, BaseException]]:
        statuses: dict[str, ReplicaStatus] = {}

        async def ask(replica: FleetMember) -> None:
            statuses[replica.name] = await replica.status()

        replicas = self.running
        errors = await self._on_all(ask, STATUS_TIMEOUT_S, "reading the state", replicas, key="STATUS_TIMEOUT_S")
        return [statuses[replica.name] for replica in replicas if replica.name in statuses], errors

    async def _on_all(
        self,
        call: Callable[[FleetMember], Awaitable[Any]],
        timeout_s: float,
        what: str,
        replicas: Sequence[FleetMember] | None = None,
        key: str = "timeout_s",
    ) -> dict[str, BaseException]:
        """Replica -> error of those on which it failed. `key`: what the deadline is called, for whoever meets it."""

        async def one(replica: FleetMember) -> None:
            async with within(timeout_s, key, f"{what} on {replica.name}"):
                await call(replica)

        chosen = self.running if replicas is None else replicas
        results = await asyncio.gather(*(one(replica) for replica in chosen), return_exceptions=True)
        return {r.name: error for r, error in zip(chosen, results, strict=True) if error is not None}

    # -- counters ------------------------------------------------------------------------------------------------------

    async def totals(self, timeout_s: float = STATS_TIMEOUT_S) -> dict[str, float]:
        """The replicas' counters since their start, summed; of those that died, or do not answer in time, what they
        said last."""
        self._last_stats |= await self.stats(timeout_s)
        totals: defaultdict[str, float] = defaultdict(float)
        for stats in self._last_stats.values():
            for key, value in stats.items():
                totals[key] += value
        return totals

    async def stats(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, dict[str, float]]:
        """Counters of each replica that answers."""
        stats: dict[str, dict[str, float]] = {}

        async def ask(replica: FleetMember) -> None:
            stats[replica.name] = await replica.stats()

        for error in (await self._on_all(ask, timeout_s, "reading the counters")).values():
            logger.info("%r", error)  # who is lost is the monitor's to tell
        return stats

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
