"""A replica as its fleet sees it."""

from collections.abc import Collection, Mapping
from typing import Protocol

from configs.schema import PauseMode
from rollout.progress import ProgressReport
from rollout.request_ids import RequestId
from weight_sync.protocol import WeightTarget


class FleetMember(WeightTarget, Protocol):
    @property
    def node(self) -> str:
        """The node that runs it."""
        ...

    async def pause(self, mode: PauseMode, clear_cache: bool = False) -> None: ...

    async def resume(self) -> float: ...

    async def abort(self, names: Collection[str] | None = None) -> list[str]: ...

    async def progress(self, known: Mapping[RequestId, int]) -> ProgressReport: ...

    async def stats(self) -> dict[str, float]: ...

    async def wait_dead(self) -> BaseException: ...

    def kill(self) -> None:
        """End its processes in any state. Returns at once."""
        ...
