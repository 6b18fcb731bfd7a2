"""Chooses the replica for each group: the least loaded one in service that has room."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from rollout.errors import NoReplicaLeftError
from rollout.replica.lifecycle import Replica, ReplicaState


def max_inflight(max_num_seqs: int, group_size: int, per_seat: int = 2) -> int:
    """Return how many trajectories are routed to one replica at most: `per_seat` for each of its seats, and one group.

    A group whose requests travel as one call is charged whole until its longest trajectory is done, and an episode of
    several turns also while its tools run, so one charge per seat would leave seats empty: an episode that generates
    for a fifth of its time needs five per seat. The extra group is needed because the next group reserves its room
    before it waits for a slot: a group that failed must find room as well, or neither would ever continue."""
    return max(per_seat * max_num_seqs, group_size) + group_size


class ReplicaRouter:
    """Counts trajectories per replica. A group goes to one replica whole, so its prompt is prefilled once.

    Example:
        name = await router.acquire(8)  # waits for room
        router.release(name, 5)         # five of its episodes have ended
        router.release(name, 3)
    """

    def __init__(self, replicas: Mapping[str, Replica] | Sequence[str], max_inflight: int):
        """
        Args:
            replicas: the records of a fleet, which may gain more later. Names alone, where there is no fleet, are
                records of the router's own, in service at once.
            max_inflight: trajectories that a replica has at most at a time.
        """
        self.replicas: Mapping[str, Replica] = (
            replicas
            if isinstance(replicas, Mapping)
            else {name: Replica(name=name, state=ReplicaState.READY) for name in replicas}
        )
        self.max_inflight = max_inflight
        self._changed = asyncio.Event()
        # Held while waiting for room, so that groups are served in the order in which they came: a small one that
        # would fit must not overtake a big one for ever.
        self._turn = asyncio.Lock()

    @property
    def healthy(self) -> list[str]:
        """The names of the replicas in service."""
        return [name for name, replica in self.replicas.items() if replica.state is ReplicaState.READY]

    async def acquire(self, count: int, prefer: str | None = None) -> str:
        """Reserve `count` trajectories, waiting for a replica in service that has room. Raises NoReplicaLeftError.

        `prefer`: taken if it is in service and has room, whatever the others' load: it has the prefix in its cache.
        """
        async with self._turn:
            while (replica := self._choose(count, prefer)) is None:
                await self._changed.wait()
            replica.in_flight += count
            replica.assigned += count
            return replica.name

    def release(self, name: str, count: int) -> None:
        """Give back `count` trajectories of an `acquire`, all or some of them."""
        self.replicas[name].in_flight -= count
        self.wake()

    async def in_service(self) -> list[str]:
        """Wait until a replica is in service. Returns all that are. Raises NoReplicaLeftError."""
        while not self.healthy:
            self._require_replica()
            await self._changed.wait()
        return self.healthy

    @asynccontextmanager
    async def visit(self, name: str) -> AsyncIterator[None]:
        """Mark the work of an evaluation, which is not routed. It takes no room, but `emptied(name)` waits for it."""
        self.replicas[name].visits += 1
        try:
            yield
        finally:
            self.replicas[name].visits -= 1
            self.wake()

    async def emptied(self, name: str) -> None:
        """Return when nothing runs on the replica."""
        replica = self.replicas[name]
        while replica.in_flight or replica.visits:
            await self._changed.wait()

    async def eject(self, name: str, error: BaseException) -> None:
        """Route nothing more to `name` for now."""
        self.replicas[name].leave_service(error)

    async def remove(self, name: str, error: BaseException) -> None:
        """Never route to `name` again. Waiters wake up, because it may have been the last replica."""
        replica = self.replicas[name]
        replica.reason = error
        if not replica.is_dead:
            replica.enter(ReplicaState.DEAD)
        self.wake()

    async def admit(self, name: str, global_steps: int = 0) -> None:
        """Route to `name` again, unless it has gone or goes for good. The caller has verified its weights."""
        replica = self.replicas[name]
        if replica.state not in (ReplicaState.DRAINING, ReplicaState.DEAD):
            replica.enter_service(global_steps)
            self.wake()

    def limit(self, max_inflight: int) -> None:
        """Change the number of trajectories that a replica has at most. Those that are there stay."""
        if max_inflight != self.max_inflight:
            self.max_inflight = max_inflight
            self.wake()

    def gauges(self) -> dict[str, float]:
        return {
            "rollout/inflight_trajectories": sum(replica.in_flight for replica in self.replicas.values()),
            "rollout/concurrency": self.max_inflight,
        }

    def wake(self) -> None:
        """Let all who wait look again: a record has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _require_replica(self) -> None:
        """Raises NoReplicaLeftError when none is in service or may yet come into it."""
        if all(replica.is_dead for replica in self.replicas.values()):
            errors = "; ".join(f"{name}: {replica.reason!r}" for name, replica in self.replicas.items())
            raise NoReplicaLeftError(f"no replica left: {errors}")

    def _choose(self, count: int, prefer: str | None) -> Replica | None:
        if prefer is not None and self._has_room(self.replicas[prefer], count):
            return self.replicas[prefer]
        self._require_replica()
        in_service = [replica for replica in self.replicas.values() if replica.state is ReplicaState.READY]
        least = min(in_service, key=lambda replica: (replica.in_flight, replica.assigned), default=None)
        return least if least is not None and self._has_room(least, count) else None

    def _has_room(self, replica: Replica, count: int) -> bool:
        """Return whether it is in service and has room. A group larger than the limit still has to go somewhere: to an
        idle replica."""
        is_idle, fits = replica.in_flight == 0, replica.in_flight <= self.max_inflight - count
        return replica.state is ReplicaState.READY and (is_idle or fits)
