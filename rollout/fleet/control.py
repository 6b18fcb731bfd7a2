"""Orders and questions to all replicas at once: pause, resume, abort, state and counters."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from configs.runtime.deadline import within
from configs.schema import PauseMode
from rollout.errors import FleetPauseError, PauseConflictError
from rollout.events.kinds import FleetEvent, FleetEventKind
from rollout.fleet.fleet import ReplicaFleet, now
from rollout.replica.lifecycle import FleetMember
from weight_sync.protocol import ReplicaStatus

T = TypeVar("T")
LOOK_S = 0.5
"""The seconds between two looks at how long a pause of clients has lasted."""
RETRY_S = 10.0
"""The time between two tries to end a pause that lasts too long."""
Deadline = tuple[float, str]
"""Seconds, and the key that sets them."""


@dataclass(frozen=True, slots=True)
class ClientPause:
    """A pause that clients ordered and nobody has ended."""

    mode: PauseMode
    by: str
    """The client who ordered it last."""
    since: float
    """The time of the first order, in seconds since 1970."""
    began: float
    """The same time on the clock of the event loop."""


class FleetControl:
    """Carries out what clients ask of the whole fleet, over HTTP or in the process: `rollout.http.control.Controlled`.

    Example:
        await control.pause(PauseMode.keep)  # every replica is frozen, or none is and FleetPauseError is raised
        await control.align(replica)         # a replica that starts meanwhile is paused too
    """

    def __init__(self, fleet: ReplicaFleet, pause_timeout_s: float = 60.0):
        self._fleet = fleet
        self._pause_timeout_s = pause_timeout_s
        self._resuming = pause_timeout_s, "weight_sync.pause_timeout_s"
        self._answering = fleet.answer_timeout_s, "rollout.answer_timeout_s"
        self.paused: ClientPause | None = None
        self._num_orders = 0
        self._before: tuple[ClientPause | None, dict[str, str | None]] | None = None
        """State of the fleet and of each replica before the oldest pause that is under way."""
        self._last_time = time.monotonic()
        self._last_busy_s = self._last_tokens = 0.0

    # -- pause, resume, abort ------------------------------------------------------------------------------------------

    async def align(self, replica: FleetMember) -> None:
        """Pause a replica that was just registered if the fleet is paused. Raises FleetPauseError."""
        if (paused := self.paused) is not None:
            what = f"pause({paused.mode.value})"
            _, errors = await self._on_all(lambda r: r.pause(paused.mode), what, self._pausing(None), [replica])
            if errors:
                raise FleetPauseError(what, errors)

    async def pause(
        self, mode: PauseMode, clear_cache: bool = False, timeout_s: float | None = None, by: str = "the program"
    ) -> None:
        """Return when every replica is paused, within `timeout_s`, by default weight_sync.pause_timeout_s. Raises
        FleetPauseError when one is not: then the replicas that were not paused before are resumed, within as long,
        unless another order came meanwhile, which stands."""
        before, modes = self._before = self._before or (self.paused, {})
        first = self.paused
        since, began = (time.time(), now()) if first is None else (first.since, first.began)
        # Replicas that are registered from here on are paused too.
        order = self._order(ClientPause(mode, by, since, began))
        deadline = self._pausing(timeout_s)

        async def pause(replica: FleetMember) -> None:
            modes.setdefault(replica.name, (await replica.status()).pause_mode)
            if order != self._num_orders:
                raise PauseConflictError("another order came before this one had reached the replica")
            await replica.pause(mode, clear_cache, timeout_s)

        _, errors = await self._on_all(pause, f"pause({mode.value})", deadline)
        if order == self._num_orders:
            self._before = None
            if errors:
                self.paused = before
                # Also those that were late: the order to pause still reaches them, and then this one. Not those that
                # refused: a resume would end another client's pause.
                stays = {name for name, error in errors.items() if not isinstance(error, TimeoutError)}
                undo = [r for r in self._fleet.running if modes.get(r.name, before) is None and r.name not in stays]
                errors = (await self._on_all(lambda r: r.resume(), "resume", deadline, undo))[1] | errors
        if errors:
            failure = FleetPauseError(f"pause({mode.value})", errors)
            self._tell(FleetEventKind.FAILED, f"not paused ({mode.value}) by {by}: {failure}")
            raise failure
        self._tell(FleetEventKind.PAUSED, f"paused ({mode.value}) by {by}")

    def _pausing(self, timeout_s: float | None) -> Deadline:
        """Return the deadline of a call to pause. A replica keeps the pause's own deadline, because only it can undo a
        pause that is too late; this one is for a replica that does not answer any more."""
        key, seconds = "weight_sync.pause_timeout_s", self._pause_timeout_s
        if timeout_s is not None:
            key, seconds = "timeout_s", timeout_s
        return seconds + self._fleet.answer_timeout_s, f"{key} + rollout.answer_timeout_s"

    def _order(self, paused: ClientPause | None) -> int:
        self.paused = paused
        self._num_orders += 1
        return self._num_orders

    async def resume(self, by: str = "the program") -> None:
        """Return when every replica generates again. Raises FleetPauseError."""
        self._order(None)
        self._before = None
        _, errors = await self._on_all(lambda r: r.resume(), "resume", self._resuming)
        if errors:
            failure = FleetPauseError("resume", errors)
            self._tell(FleetEventKind.FAILED, f"not resumed by {by}: {failure}")
            raise failure
        self._tell(FleetEventKind.RESUMED, f"resumed by {by}")

    async def end_long_pauses(self, max_pause_s: float) -> None:
        """Resume the fleet whenever clients have paused it for `max_pause_s` (serve.max_pause_s), until cancelled: a
        client that went away must not stop a run for ever. Another pause within that time does not begin it anew."""
        while True:
            await asyncio.sleep(min(LOOK_S, max_pause_s))
            pause = self.paused
            if pause is not None and now() - pause.began >= max_pause_s:
                limit = f"serve.max_pause_s={max_pause_s:g}"
                await self._insist_on_resuming(f"{limit}. WARNING: {pause.by} had paused the run for longer than that")

    async def _insist_on_resuming(self, by: str) -> None:
        """Resume, again while it fails and nobody pauses. Replicas with torn weights are resumed by their update."""
        while True:
            try:
                return await self.resume(by)
            except FleetPauseError as error:  # it has been reported
                if all(isinstance(reason, PauseConflictError) for reason in error.errors.values()):
                    return
            await asyncio.sleep(RETRY_S)
            if self.paused is not None:
                return

    def _tell(self, kind: FleetEventKind, text: str) -> None:
        self._fleet.report(FleetEvent(kind, None, text))

    async def abort(self, names: Collection[str] | None = None) -> list[str]:
        """End these requests, by default all. Returns the ids of those that ended. Raises FleetPauseError."""
        answers, errors = await self._on_all(lambda r: r.abort(names), "abort", self._answering)
        ended = [request_id for ids in answers.values() for request_id in ids]
        if errors:
            raise FleetPauseError(f"abort, which ended {len(ended)} requests elsewhere,", errors)
        return ended

    # -- state ---------------------------------------------------------------------------------------------------------

    async def is_paused(self) -> bool:
        """Return whether all replicas are paused. Raise FleetPauseError if they differ, or if one does not answer."""
        statuses, errors = await self._on_all(lambda r: r.status(), "reading the state", self._answering)
        if errors:
            raise FleetPauseError("is_paused", errors)
        paused = {name: status.is_paused for name, status in statuses.items()}
        if len(set(paused.values())) > 1:
            raise FleetPauseError("is_paused", {name: RuntimeError("paused") for name, is_ in paused.items() if is_})
        return all(paused.values()) if paused else self.paused is not None

    async def out_of_service(self) -> str | None:
        return None if self._fleet.router.healthy else "no replica is in service"

    async def statuses(self) -> list[ReplicaStatus]:
        """Return the state of each replica that answers."""
        return list((await self._on_all(lambda r: r.status(), "reading the state", self._answering))[0].values())

    # -- counters ------------------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, dict[str, float]]:
        """Return the counters of each replica that answers, since its start."""
        return (await self._on_all(lambda r: r.stats(), "reading the counters", self._answering))[0]

    async def engine_metrics(self) -> dict[str, str]:
        """Return the text for Prometheus of each replica's engine, of those that answer."""
        return (await self._on_all(lambda r: r.engine_metrics(), "reading the engine's metrics", self._answering))[0]

    async def totals(self) -> dict[str, float]:
        """Return the counters summed over all replicas there have been, each with its last answer."""
        for name, stats in (await self.stats()).items():
            self._fleet.replicas[name].stats = stats
        totals: defaultdict[str, float] = defaultdict(float)
        for replica in self._fleet.replicas.values():
            for key, value in replica.stats.items():
                totals[key] += value
        return totals

    async def gauges(self) -> dict[str, float]:
        """Return the metrics of router, fleet and engines. `perf/replica_idle` and the throughput count since the last
        call."""
        totals = await self.totals()
        read_at = time.monotonic()
        seconds = read_at - self._last_time
        idle = 1 - (totals["busy_s"] - self._last_busy_s) / (seconds * max(1, len(self._fleet.running)))
        tokens = totals["tokens"] - self._last_tokens
        self._last_time, self._last_busy_s, self._last_tokens = read_at, totals["busy_s"], totals["tokens"]
        speculation = {}
        if drafted := totals["drafted_tokens"]:
            speculation["rollout/spec_acceptance"] = totals["accepted_tokens"] / drafted
        return {
            **speculation,
            **self._fleet.router.gauges(),
            **self._fleet.gauges(),
            **{f"rollout/{name}": totals[name] for name in ("engine_requests", "aborted", "continued")},
            "perf/replica_idle": max(0.0, idle),
            "perf/throughput/generated": tokens / seconds,
            "rollout/prefix_hit_rate": totals["cached_tokens"] / max(1.0, totals["prompt_tokens"]),
        }

    # -- one call on every replica -------------------------------------------------------------------------------------

    async def _on_all(
        self,
        call: Callable[[FleetMember], Awaitable[T]],
        what: str,
        deadline: Deadline,
        replicas: Sequence[FleetMember] | None = None,
    ) -> tuple[dict[str, T], dict[str, BaseException]]:
        """Call the replicas, by default all that run, concurrently. Returns answers and errors by replica."""

        async def call_one(replica: FleetMember) -> T:
            async with within(*deadline, f"{what} on {replica.name}"):
                return await call(replica)

        chosen = self._fleet.running if replicas is None else replicas
        results = await asyncio.gather(*map(call_one, chosen), return_exceptions=True)
        named = {replica.name: result for replica, result in zip(chosen, results, strict=True)}
        errors = {name: result for name, result in named.items() if isinstance(result, BaseException)}
        return {name: result for name, result in named.items() if not isinstance(result, BaseException)}, errors
