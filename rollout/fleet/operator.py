"""Replicas that come and go during a run: replacements of lost ones, and changes that an operator asks for."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.lifecycle import ENDED, FleetMember, FleetRefusalError, Replica, ReplicaState


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
    """The client who paused it, or the reason why it is not in service."""


@dataclass(kw_only=True)
class FleetOperator:
    """Starts the replicas that the fleet wants, and brings each to the current weights before it serves.

    Example: fleet.wanted.get -> start(name) -> fleet.register -> control.align -> catch_up([name]) -> fleet.admit
    """

    fleet: ReplicaFleet
    control: FleetControl
    start: Callable[[str], Awaitable[FleetMember]]
    """Returns a replica whose engine runs and which every agent worker knows; cancelled, it leaves nothing behind."""
    catch_up: Callable[[Collection[str]], Awaitable[object]]
    """Brings replicas to the current weights and admits them."""
    drain_timeout_s: float
    """rollout.group_timeout_s, in which every group ends or fails."""
    _tasks: asyncio.TaskGroup | None = field(default=None, init=False)

    async def run(self) -> None:
        """Start replicas until cancelled. Raises TooFewReplicasError when replacements fail and too few are left."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                replica = self.fleet.replicas[await self.fleet.wanted.get()]
                if not replica.is_dead:  # it was removed meanwhile
                    replica.starting = self._tasks.create_task(self._bring_up(replica))

    async def _bring_up(self, replica: Replica) -> None:
        """Start one replica. A failure counts as a loss: another one is tried, within rollout.max_replacements."""
        name = replica.name
        error: BaseException = RuntimeError(f"{name} could not be brought to the current weights")
        try:
            handle = await self.start(name)
            if not self.fleet.register(handle):  # it was removed meanwhile
                handle.kill()
                return
            await self.control.align(handle)
            await self.catch_up([name])
        except Exception as failure:
            error = failure
        finally:
            replica.starting = None
        if replica.state in (ReplicaState.STARTING, ReplicaState.SYNCING, ReplicaState.STALE):
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
        if self._tasks is None:
            raise RuntimeError("replicas come and go only while the run is training")
        await self.fleet.drain(name)
        self._tasks.create_task(self._end_when_empty(name))

    async def remove(self, name: str) -> None:
        """Return when the replica has ended."""
        replica = self.fleet.replicas.get(name)
        if replica is not None and replica.is_dead:
            raise FleetRefusalError(f"{name} cannot be removed: {ENDED}")
        await self.fleet.retire(name, "removed by the operator")
        if replica is not None and replica.starting is not None and replica.handle is None:
            replica.starting.cancel()

    async def _end_when_empty(self, name: str) -> None:
        why = "drained"
        try:
            async with asyncio.timeout(self.drain_timeout_s):
                await self.fleet.router.emptied(name)
        except TimeoutError:
            why = f"not drained within rollout.group_timeout_s={self.drain_timeout_s:g}"
        await self.fleet.retire(name, why)

    def rows(self) -> list[ReplicaRow]:
        """Return the rows of all replicas that there have been."""
        return [self._row(replica) for replica in self.fleet.replicas.values()]

    def _row(self, replica: Replica) -> ReplicaRow:
        watch, pause = replica.watch, self.control.paused
        speed = None if watch is None else watch.speed
        state, why = replica.state.value, None if replica.reason is None else str(replica.reason)
        if pause is not None and not replica.is_dead:
            since = datetime.fromtimestamp(pause.since, UTC)
            state = "PAUSED" if replica.state is ReplicaState.READY else state
            why, speed = f"paused ({pause.mode.value}) by {pause.by} since {since:%Y-%m-%d %H:%M:%S} UTC", None
        return ReplicaRow(
            name=replica.name,
            state=state,
            global_steps=replica.version,
            running=0 if watch is None else watch.running,
            tokens_per_s=0.0 if speed is None else round(speed.total, 1),
            node=replica.node,
            why=why,
        )
