"""The control routes over one replica."""

import asyncio
from collections.abc import Collection, Sequence

from configs.runtime.deadline import within
from configs.schema import PauseMode
from rollout.replica.replica import ReplicaStatus, RolloutReplica


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
