"""What a replica is to its fleet, and where what it tells of its trajectories is kept."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from configs.schema import PauseMode
from rollout.progress import ProgressReport
from rollout.replica import CommitReport, ReplicaStatus


class FleetMember(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def node(self) -> str:
        """Where it runs."""
        ...

    @property
    def num_workers(self) -> int: ...

    async def pause(self, mode: PauseMode, clear_cache: bool = False) -> None: ...

    async def resume(self) -> float: ...

    async def abort(self, request_ids: Collection[str] | None = None) -> list[str]: ...

    async def status(self) -> ReplicaStatus: ...

    async def progress(self, known: Mapping[str, int]) -> ProgressReport: ...

    async def stage(self, manifest: dict[str, Any]) -> None: ...

    async def commit(self, manifest: dict[str, Any]) -> CommitReport: ...

    async def stats(self) -> dict[str, float]: ...

    async def wait_dead(self) -> BaseException: ...

    def kill(self) -> None:
        """For sure, whatever state its processes are in. Returns at once."""
        ...


class ProgressStore(Protocol):
    """Keeps what is known of every trajectory under way."""

    def known(self, name: str) -> Mapping[str, int]:
        """request -> tokens of it that are known, on that replica."""
        ...

    def take(self, name: str, report: ProgressReport) -> None: ...


class NoStore:
    """Keeps nothing: trajectories of lost replicas start again."""

    def known(self, name: str) -> Mapping[str, int]:
        return {}

    def take(self, name: str, report: ProgressReport) -> None:
        pass
