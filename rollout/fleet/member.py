"""A replica as its fleet sees it."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from configs.schema import PauseMode
from rollout.progress import ProgressReport
from rollout.replica.replica import CommitReport, ReplicaStatus
from rollout.request_ids import RequestId


class FleetMember(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def node(self) -> str:
        """The node that runs it."""
        ...

    @property
    def num_workers(self) -> int: ...

    async def pause(self, mode: PauseMode, clear_cache: bool = False) -> None: ...

    async def resume(self) -> float: ...

    async def abort(self, names: Collection[str] | None = None) -> list[str]: ...

    async def status(self) -> ReplicaStatus: ...

    async def progress(self, known: Mapping[RequestId, int]) -> ProgressReport: ...

    async def stage(self, manifest: dict[str, Any]) -> None: ...

    async def commit(self, manifest: dict[str, Any]) -> CommitReport: ...

    async def stats(self) -> dict[str, float]: ...

    async def wait_dead(self) -> BaseException: ...

    def kill(self) -> None:
        """End its processes in any state. Returns at once."""
        ...
