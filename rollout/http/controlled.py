"""What the control routes act on: one replica, or the whole fleet."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from configs.runtime.deadline import within
from configs.schema import PauseMode
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica import ReplicaStatus, RolloutReplica
from rollout.router import ReplicaRouter


class Controlled(Protocol):
    async def pause(self, mode: PauseMode, clear_cache: bool, timeout_s: float) -> None:
        """Returns when it is complete; when it fails, everything is as it was before."""
        ...

    async def resume(self) -> object: ...

    async def abort(self, request_ids: Collection[str] | None) -> list[str]:
        """None is all requests. The engines' ids of those that it ended."""
        ...

    async def is_paused(self) -> bool: ...

    async def statuses(self) -> Sequence[ReplicaStatus]: ...

    async def stats(self) -> dict[str, dict[str, float]]:
        """Counters of each replica."""
        ...

    async def out_of_service(self) -> str | None:
        """Why it cannot serve; None when it can."""
        ...


class ReplicaControl:
    """One replica, in its own process."""

    def __init__(self, replica: RolloutReplica):
        self._replica = replica
        self._death = asyncio.create_task(replica.wait_dead())

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout_s: float) -> None:
        async with within(timeout_s, "timeout_s", f"pause({mode.value}) on {self._replica.name}"):
            await self._replica.pause(mode, clear_cache)

    async def resume(self) -> object:
        return await self._replica.resume()

    async def abort(self, request_ids: Collection[str] | None) -> list[str]:
        return await self._replica.abort(request_ids)

    async def is_paused(self) -> bool:
        return self._replica.is_paused()

    async def statuses(self) -> Sequence[ReplicaStatus]:
        return [await self._replica.status()]

    async def stats(self) -> dict[str, dict[str, float]]:
        return {self._replica.name: await self._replica.stats()}

    async def out_of_service(self) -> str | None:
        if self._death.done():
            return f"{self._replica.name} died: {self._death.result()}"
        if (await self._replica.status()).torn:
            return f"the weights of {self._replica.name} are torn by a failed update"
        return None


class FleetControl:
    """All replicas, from the driver."""

    def __init__(self, fleet: ReplicaFleet, router: ReplicaRouter):
        self._fleet = fleet
        self._router = router

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout_s: float) -> None:
        await self._fleet.pause(mode, clear_cache, timeout_s)

    async def resume(self) -> object:
        return await self._fleet.resume()

    async def abort(self, request_ids: Collection[str] | None) -> list[str]:
        return await self._fleet.abort(request_ids)

    async def is_paused(self) -> bool:
        return await self._fleet.is_paused()

    async def statuses(self) -> Sequence[ReplicaStatus]:
        return await self._fleet.statuses()

    async def stats(self) -> dict[str, dict[str, float]]:
        return await self._fleet.stats()

    async def out_of_service(self) -> str | None:
        return None if self._router.healthy else "no replica is in service"
