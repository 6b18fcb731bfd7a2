"""The replicas as one: who is in service, pause and resume over all of them, their counters, and their deaths."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from configs.deadline import within
from configs.schema import PauseMode
from rollout.replica import CommitReport, ReplicaStatus
from rollout.router import ReplicaRouter

STATS_TIMEOUT_S = 30.0


class TooFewReplicasError(RuntimeError):
    """Fewer replicas are left than rollout.min_replicas. The message says which were lost, and why."""


class FleetPauseError(RuntimeError):
    """Some replicas could not be paused or resumed. `errors`: replica -> why. The others are as they were before."""

    def __init__(self, what: str, errors: dict[str, BaseException]):
        super().__init__(f"{what} failed on " + "; ".join(f"{name}: {error!r}" for name, error in errors.items()))
        self.errors = errors


class FleetMember(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def num_workers(self) -> int: ...

    async def pause(self, mode: PauseMode, clear_cache: bool = False) -> None: ...

    async def resume(self) -> float: ...

    async def abort(self, request_ids: Collection[str] | None = None) -> list[str]: ...

    async def status(self) -> ReplicaStatus: ...

    async def stage(self, manifest: dict[str, Any]) -> None: ...

    async def commit(self, manifest: dict[str, Any]) -> CommitReport: ...

    async def stats(self) -> dict[str, float]: ...

    async def wait_dead(self) -> BaseException: ...

    def kill(self) -> None: ...


class ReplicaFleet:
    """A replica is in service, ejected (it goes on with what it has, and may come back) or gone. One that is pinned is
    ejected on purpose, and keeps its version until it is not."""

    def __init__(
        self, replicas: Sequence[FleetMember], router: ReplicaRouter, min_replicas: int, report: Callable[[str], None]
    ):
        """`report`: told in a sentence who leaves and who comes back."""
        self._replicas = {replica.name: replica for replica in replicas}
        self._router = router
        self._min_replicas = min_replicas
        self._report = report
        self._gone: dict[str, BaseException] = {}
        self._pinned: set[str] = set()
        self._last_stats: dict[str, dict[str, float]] = {}
        self._last_time = time.monotonic()
        self._last_busy_s = 0.0

    # -- membership ----------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[FleetMember]:
        """Every replica that is not gone, in service or not."""
        return [replica for name, replica in self._replicas.items() if name not in self._gone]

    @property
    def targets(self) -> list[FleetMember]:
        """Those that updates go to: the members that are not pinned."""
        return [replica for replica in self.members if replica.name not in self._pinned]

    async def pin(self, count: int, why: str) -> list[str]:
        """Take up to `count` replicas out of service and out of updates; one is left in service. What they are doing
        goes on. Their names. The caller sees to it that no update is under way."""
        names = self._router.healthy[1:][-count:] if count else []
        for name in names:
            self._pinned.add(name)
            await self.eject(name, RuntimeError(why))
        return names

    def unpin(self, names: Collection[str]) -> None:
        """Updates go to them again. The next one, or catching up, brings them back into service."""
        self._pinned.difference_update(names)

    async def eject(self, name: str, error: BaseException) -> None:
        """Route nothing more to it for now. What it is doing goes on."""
        self._report(f"{name} is out of service: {error}")
        await self._router.eject(name, error)

    async def admit(self, name: str) -> None:
        """Route to it (again). The caller has verified its weights."""
        if name not in self._router.healthy and name not in self._gone:
            self._report(f"{name} is back in service")
        await self._router.admit(name)

    async def give_up(self, name: str, error: BaseException) -> None:
        """End it for good. What it was generating is lost, and starts again elsewhere."""
        if name in self._gone:
            return
        self._report(f"{name} is given up: {error}")
        self._gone[name] = error
        await self._router.remove(name, error)
        self._replicas[name].kill()

    async def lose(self, name: str, error: BaseException) -> None:
        """It died. Raises TooFewReplicasError."""
        await self.give_up(name, error)
        self.require_enough(error)

    def require_enough(self, cause: BaseException) -> None:
        """Raises TooFewReplicasError when fewer than rollout.min_replicas are in service or pinned."""
        left = len(self._router.healthy) + len(self._pinned - self._gone.keys())  # the pinned come back
        if left < self._min_replicas:
            raise TooFewReplicasError(
                f"{left} replicas are left in service, rollout.min_replicas={self._min_replicas}: {cause}"
            ) from cause

    async def watch(self) -> None:
        """Never returns. Raises TooFewReplicasError when a death leaves too few, also while nobody calls the engine."""
        async with asyncio.TaskGroup() as watchers:
            for replica in self.members:
                watchers.create_task(self._watch(replica), name=f"watch-{replica.name}")
            await asyncio.get_running_loop().create_future()

    async def _watch(self, replica: FleetMember) -> None:
        try:
            reason = await replica.wait_dead()
        except Exception as error:  # its whole process went, so that nobody was left to answer
            reason = error
        log = f"its log is logs/{replica.name}.log in the run folder"
        await self.lose(replica.name, RuntimeError(f"{replica.name} died: {reason}; {log}"))

    # -- control -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, clear_cache: bool = False, timeout_s: float = 60.0) -> None:
        """Returns when every replica is paused. Raises FleetPauseError when one is not: then those that were not paused
        before are resumed."""
        before = {status.name: status for status in await self.statuses()}
        errors = await self._on_all(lambda r: r.pause(mode, clear_cache), timeout_s, f"pause({mode.value})")
        if errors:
            undo = [r for r in self.members if r.name not in errors and before[r.name].pause_mode is None]
            errors |= await self._on_all(lambda r: r.resume(), timeout_s, "resume", undo)
            raise FleetPauseError(f"pause({mode.value})", errors)

    async def resume(self, timeout_s: float = 60.0) -> None:
        """Returns when every replica goes on. Raises FleetPauseError; the others do go on."""
        errors = await self._on_all(lambda r: r.resume(), timeout_s, "resume")
        if errors:
            raise FleetPauseError("resume", errors)

    async def abort(self, request_ids: Collection[str] | None = None, timeout_s: float = 60.0) -> list[str]:
        """End these requests wherever they are; None is all. Returns those that there were."""
        async with within(timeout_s, "timeout_s", "abort"):
            answers = await asyncio.gather(*(replica.abort(request_ids) for replica in self.members))
        return [name for ended in answers for name in ended]

    async def is_paused(self) -> bool:
        """Raises FleetPauseError when some are and others are not."""
        paused = {status.name: status.pause_mode is not None or status.torn for status in await self.statuses()}
        if len(set(paused.values())) > 1:
            raise FleetPauseError("is_paused", {name: RuntimeError("paused") for name, is_ in paused.items() if is_})
        return all(paused.values())

    async def statuses(self) -> list[ReplicaStatus]:
        """Of every replica that is not gone: the version it serves, and whether it is paused."""
        async with within(STATS_TIMEOUT_S, "STATS_TIMEOUT_S", "reading the replicas' state"):
            return await asyncio.gather(*(replica.status() for replica in self.members))

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

        chosen = self.members if replicas is None else replicas
        results = await asyncio.gather(*(one(replica) for replica in chosen), return_exceptions=True)
        return {r.name: error for r, error in zip(chosen, results, strict=True) if error is not None}

    # -- counters ------------------------------------------------------------------------------------------------------

    async def totals(self) -> dict[str, float]:
        """The replicas' counters since their start, summed; of those that died, what they said last. Raises
        TimeoutError when one does not answer."""
        targets = self.members
        async with within(STATS_TIMEOUT_S, "STATS_TIMEOUT_S", "reading the replicas' counters"):
            answers = await asyncio.gather(*(replica.stats() for replica in targets), return_exceptions=True)
        for replica, answer in zip(targets, answers, strict=True):
            if isinstance(answer, dict):
                self._last_stats[replica.name] = answer
            elif replica.name not in self._last_stats:
                raise answer  # who died before it said anything; other deaths are `watch`'s to tell
        stats = list(self._last_stats.values())
        return {key: sum(s[key] for s in stats) for key in stats[0]}

    async def gauges(self) -> dict[str, float]:
        """Metrics since the last call."""
        totals = await self.totals()
        now = time.monotonic()
        busy_s = totals["busy_s"] - self._last_busy_s
        idle = 1 - busy_s / ((now - self._last_time) * max(1, len(self.members)))
        self._last_time, self._last_busy_s = now, totals["busy_s"]
        return {
            **self._router.gauges(),
            "perf/replica_idle": max(0.0, idle),
            "rollout/engine_requests": totals["engine_requests"],
            "rollout/aborted": totals["aborted"],
            "rollout/continued": totals["continued"],
            "rollout/prefix_hit_rate": totals["cached_tokens"] / max(1.0, totals["prompt_tokens"]),
        }
