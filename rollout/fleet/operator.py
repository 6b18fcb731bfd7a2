"""Replicas that come and go during a run: replacements of lost ones, and changes that an operator asks for."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.health import HealthMonitor
from rollout.fleet.lifecycle import ENDED, FleetRefusalError, ReplicaState
from rollout.fleet.member import FleetMember


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """One replica in `fleet.py status`. Dead ones stay, with the reason."""

    name: str
    state: str
    """A `ReplicaState`, or PAUSED: it would be READY, and a client has paused the fleet."""
    global_steps: int
    """Tag of the weights that were verified last; -1 before the first."""
    running: int
    tokens_per_s: float
    node: str | None
    """None before its engine runs."""
    why: str | None
    """Who paused it, or why it is not in service."""


@dataclass(kw_only=True)
class FleetOperator:
    """Starts the replicas that the fleet wants, and brings each to the current weights before it serves.

    Example: fleet.wanted.get -> start(name) -> fleet.register -> control.align -> catch_up([name]) -> fleet.admit
    """

    fleet: ReplicaFleet
    control: FleetControl
    health: HealthMonitor
    start: Callable[[str], Awaitable[FleetMember]]
    """Returns a replica whose engine runs and which every agent worker knows; cancelled, it leaves nothing behind."""
    catch_up: Callable[[Collection[str]], Awaitable[object]]
    """Brings replicas to the current weights and admits them."""
    drain_timeout_s: float
    """rollout.group_timeout_s, in which every group ends or fails."""
    _starting: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _tasks: asyncio.TaskGroup | None = field(default=None, init=False)

    async def run(self) -> None:
        """Start replicas until cancelled. Raises TooFewReplicasError when replacements fail and too few are left."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                name = await self.fleet.wanted.get()
                self._starting[name] = self._task(self._bring_up(name))

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if self._tasks is None:
            work.close()
            raise RuntimeError("replicas come and go only while the run is training")
        return self._tasks.create_task(work)

    async def _bring_up(self, name: str) -> None:
        """Start one replica. A failure counts as a loss: another one is tried, within rollout.max_replacements."""
        error: BaseException = RuntimeError(f"{name} could not be brought to the current weights")
        try:
            replica = await self.start(name)
            if not self.fleet.register(replica):  # it was removed meanwhile
                replica.kill()
                return
            await self.control.align(replica)
            await self.catch_up([name])
        except Exception as failure:
            error = failure
        finally:
            self._starting.pop(name, None)
        state = self.fleet.lives[name].state
        if state in (ReplicaState.STARTING, ReplicaState.SYNCING, ReplicaState.STALE):
            await self.fleet.lose(name, error)
        else:
            self.fleet.require_enough(error)

    # -- what an operator asks for -------------------------------------------------------------------------------------

    def add(self, count: int) -> list[str]:
        """Start `count` new replicas, each as soon as Ray has a place for it. Returns their names at once."""
        return [self.fleet.want() for _ in range(count)]

    async def drain(self, name: str) -> None:
        """Route nothing more to the replica, and remove it when its requests are done, or after `drain_timeout_s`.
        Returns at once."""
        await self.fleet.drain(name)
        self._task(self._end_when_empty(name))

    async def remove(self, name: str) -> None:
        """Return when the replica has ended."""
        if name in self.fleet.lives and self.fleet.lives[name].state is ReplicaState.DEAD:
            raise FleetRefusalError(f"{name} cannot be removed: {ENDED}")
        await self.fleet.retire(name, "removed by the operator")
        if name in self._starting and self.fleet.node_of(name) is None:
            self._starting[name].cancel()

    async def _end_when_empty(self, name: str) -> None:
        why = "drained"
        try:
            async with asyncio.timeout(self.drain_timeout_s):
                await self.fleet.router.emptied(name)
        except TimeoutError:
            why = f"not drained within rollout.group_timeout_s={self.drain_timeout_s:g}"
        await self.fleet.retire(name, why)

    def rows(self) -> list[ReplicaRow]:
        """All replicas that there have been."""
        return [self._row(name) for name in self.fleet.lives]

    def _row(self, name: str) -> ReplicaRow:
        life, report, speed = self.fleet.lives[name], self.health.last(name), self.health.speed(name, least_s=1.0)
        state, why, pause = life.state.value, self.fleet.reasons.get(name), self.control.paused
        if pause is not None and life.state is not ReplicaState.DEAD:
            since = datetime.fromtimestamp(pause.since, UTC)
            state = "PAUSED" if life.state is ReplicaState.READY else state
            why, speed = f"paused ({pause.mode.value}) by {pause.by} since {since:%Y-%m-%d %H:%M:%S} UTC", None
        return ReplicaRow(
            name=name,
            state=state,
            global_steps=life.global_steps,
            running=0 if report is None else report.running,
            tokens_per_s=0.0 if speed is None else round(speed.total, 1),
            node=self.fleet.node_of(name),
            why=why,
        )
