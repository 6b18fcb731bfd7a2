"""Chooses the replica for each group: the least loaded one in service that has room."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollout.errors import NoReplicaLeftError


def max_inflight(max_num_seqs: int, group_size: int, per_seat: int = 2) -> int:
    """Trajectories routed to one replica at most: `per_seat` for each of its seats, and one group.

    A group whose requests travel as one call is charged whole until its longest trajectory is done, and an episode of
    several turns also while its tools run, so one charge per seat would leave seats empty: an episode that generates
    for a fifth of its time needs five per seat. The extra group is needed because the next group reserves its room
    before it waits for a slot: a group that failed must find room as well, or neither would ever continue."""
    return max(per_seat * max_num_seqs, group_size) + group_size


@dataclass(slots=True)
class _Load:
    in_flight: int = 0  # trajectories
    assigned: int = 0  # trajectories ever, which breaks ties so that idle replicas take turns
    visits: int = 0  # work that runs there without being routed
    error: BaseException | None = None  # why nothing is routed to it
    removed: bool = False  # for good


class ReplicaRouter:
    """Counts trajectories per replica. A group goes to one replica whole, so its prompt is prefilled once.

    Example:
        name = await router.acquire(8)  # waits for room
        router.release(name, 5)         # five of its episodes have ended
        router.release(name, 3)
    """

    def __init__(self, replicas: list[str], max_inflight: int):
        """`max_inflight`: trajectories that a replica has at most at a time."""
        self._loads = {name: _Load() for name in replicas}
        self._max_inflight = max_inflight
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()  # first come, first served

    @property
    def healthy(self) -> list[str]:
        return [name for name, load in self._loads.items() if load.error is None]

    async def acquire(self, count: int, prefer: str | None = None) -> str:
        """Reserve `count` trajectories, waiting for a replica in service that has room. Raises NoReplicaLeftError.

        `prefer`: taken if it is in service and has room, whatever the others' load: it has the prefix in its cache.
        """
        async with self._turn:
            while (name := self._chosen(count, prefer)) is None:
                await self._changed.wait()
            self._loads[name].in_flight += count
            self._loads[name].assigned += count
            return name

    def release(self, name: str, count: int) -> None:
        """Give back `count` trajectories of an `acquire`, all or some of them."""
        self._loads[name].in_flight -= count
        self._notify()

    async def in_service(self) -> list[str]:
        """Wait until a replica is in service. Returns all that are. Raises NoReplicaLeftError."""
        while not self.healthy:
            self._require_one()
            await self._changed.wait()
        return self.healthy

    @asynccontextmanager
    async def visit(self, name: str) -> AsyncIterator[None]:
        """Work of an evaluation, which is not routed. It takes no room, but `emptied(name)` waits for it."""
        self._loads[name].visits += 1
        try:
            yield
        finally:
            self._loads[name].visits -= 1
            self._notify()

    def expect(self, name: str, error: BaseException) -> None:
        """Register `name`, which may be new, as out of service until it is admitted. `acquire` waits for it."""
        self._loads.setdefault(name, _Load()).error = error

    async def emptied(self, name: str) -> None:
        """Return when nothing runs on the replica."""
        load = self._loads[name]
        while load.in_flight or load.visits:
            await self._changed.wait()

    async def eject(self, name: str, error: BaseException) -> None:
        """Route nothing more to `name` for now."""
        self._loads[name].error = error
        self._notify()

    async def remove(self, name: str, error: BaseException) -> None:
        """Never route to `name` again. Waiters wake up, because it may have been the last replica."""
        self._loads[name].error, self._loads[name].removed = error, True
        self._notify()

    async def admit(self, name: str) -> None:
        """Route to `name` again. The caller has verified its weights."""
        if not self._loads[name].removed:
            self._loads[name].error = None
            self._notify()

    def gauges(self) -> dict[str, float]:
        return {"rollout/inflight_trajectories": sum(load.in_flight for load in self._loads.values())}

    def _notify(self) -> None:
        """Wake all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _require_one(self) -> None:
        if all(load.removed for load in self._loads.values()):
            errors = "; ".join(f"{name}: {load.error!r}" for name, load in self._loads.items())
            raise NoReplicaLeftError(f"no replica left: {errors}")

    def _chosen(self, count: int, prefer: str | None) -> str | None:
        if prefer is not None and self._has_room(prefer, count):
            return prefer
        return self._least_loaded(count)

    def _least_loaded(self, count: int) -> str | None:
        self._require_one()
        least = min(
            self.healthy, key=lambda name: (self._loads[name].in_flight, self._loads[name].assigned), default=None
        )
        return least if least is not None and self._has_room(least, count) else None

    def _has_room(self, name: str, count: int) -> bool:
        """Whether it is in service too. A group larger than the limit still has to go somewhere: to an idle replica."""
        load = self._loads[name]
        return load.error is None and (load.in_flight == 0 or load.in_flight <= self._max_inflight - count)
