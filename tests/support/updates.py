"""A trainer and replicas with a clock and no weights, and a fleet of them: what happened in an update, as events."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from configs.schema import Staging, WeightSyncConfig
from rollout.fleet.fleet import ReplicaFleet
from tests.support.fakes import make_manifest, make_tag, run_virtual
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import CommitReport, Manifest, PublishOrder, ReplicaStatus, UpdateReport, WeightTag

DEADLINES = {"stage_timeout_s": 100.0, "pause_timeout_s": 10.0, "swap_timeout_s": 50.0}
HANGS = "hangs"
WHOLE = ["stage", "stage done", "commit", "commit done"]


class FakePart:
    """Every phase takes `seconds[phase]`. Its first call then has the first of `faults[phase]`, and so on.

    Events: "<name>.<phase>", and then "... done", or "... cancelled".
    """

    def __init__(self, name: str, events: list[str]):
        self.name = name
        self.seconds: dict[str, float] = {}
        self.faults: dict[str, list[Any]] = {}
        """Errors, or HANGS."""
        self._events = events

    async def _do(self, phase: str) -> None:
        self._events.append(f"{self.name}.{phase}")
        faults = self.faults.get(phase)
        fault = faults.pop(0) if faults else None
        try:
            await asyncio.sleep(1e6 if fault is HANGS else self.seconds.get(phase, 0))
        except asyncio.CancelledError:
            self._events.append(f"{self.name}.{phase} cancelled")
            raise
        if isinstance(fault, Exception):
            raise fault
        self._events.append(f"{self.name}.{phase} done")


class FakeSource(FakePart):
    global_steps = 7
    """Optimizer steps taken."""
    checksum: int | None = None
    """The checksum that it says it sent; None is the truth."""

    def __init__(self, name: str, events: list[str]):
        super().__init__(name, events)
        self.orders: list[tuple[Any, int | None]] = []
        self.had_new: list[bool] = []

    async def publish(self, order: PublishOrder) -> Manifest:
        self.orders.append((order.receivers, order.base))
        self.had_new.append(order.has_new)
        await self._do("publish")
        return replace(make_manifest(order.global_steps), nbytes=3_000_000)

    async def send(self, manifest: Manifest) -> int:
        await self._do("send")
        return make_tag(manifest.global_steps).checksum if self.checksum is None else self.checksum


class FakeTarget(FakePart):
    num_workers = 1
    tears = False
    """A commit that fails leaves it torn."""
    frozen = False
    pause_mode: str | None = None
    frozen_s = 0.0

    def __init__(self, name: str, events: list[str]):
        super().__init__(name, events)
        self._set_state(-1, torn=False)

    def _set_state(self, version: int, torn: bool) -> None:
        frozen = self.frozen or torn
        self.state = ReplicaStatus(
            name=self.name,
            global_steps=version,
            pause_mode=self.pause_mode,
            torn=torn,
            frozen=frozen,
            is_paused=self.pause_mode is not None or torn,
        )

    async def stage(self, manifest: Manifest) -> None:
        await self._do("stage")

    async def commit(self, tag: WeightTag) -> CommitReport:
        torn = self.tears
        try:
            await self._do("commit")
            if tag != make_tag(tag.global_steps):
                raise ValueError(f"published was {tag.checksum}")
            torn = False
        finally:
            self._set_state(tag.global_steps, torn)
        return CommitReport(pause_s=self.frozen_s, swap_s=self.frozen_s / 2)

    async def receive(self, manifest: Manifest) -> CommitReport:
        await self._do("receive")
        self._set_state(manifest.global_steps, torn=False)
        return CommitReport(pause_s=self.frozen_s, swap_s=self.frozen_s / 2)

    async def status(self) -> ReplicaStatus:
        await self._do("status")
        return self.state

    async def progress(self, known: object) -> None:
        raise OSError("it tells nothing")

    def kill(self) -> None:
        self._events.append(f"{self.name}.kill")


class MeetingSource(FakeSource):
    """Sends when all receivers have come, as a collective transport does."""

    async def publish(self, order: PublishOrder) -> Manifest:
        self.missing, self.met = set(order.receivers), asyncio.get_running_loop().create_future()
        return await super().publish(order)

    async def send(self, manifest: Manifest) -> int:
        try:
            await asyncio.shield(self.met)
        except asyncio.CancelledError:
            self.met.set_exception(OSError("it stopped sending"))
            raise
        return await super().send(manifest)


class MeetingTarget(FakeTarget):
    """Waits for all other receivers of `source`."""

    source: MeetingSource

    async def stage(self, manifest: Manifest) -> None:
        await super().stage(manifest)
        self.source.missing.discard(self.name)
        if not self.source.missing:
            self.source.met.set_result(None)
        await asyncio.shield(self.source.met)


class Scene:
    """A source and its replicas; what they and the fleet did, in order."""

    def __init__(
        self, staging: Staging = Staging.host, names: str = "ab", meeting: bool = False, min_replicas: int = 1
    ) -> None:
        self.events: list[str] = []
        self.source = (MeetingSource if meeting else FakeSource)("trainer", self.events)
        self.targets: Sequence[FakeTarget] = [
            (MeetingTarget if meeting else FakeTarget)(name, self.events) for name in names
        ]
        for target in self.targets:
            if isinstance(target, MeetingTarget) and isinstance(self.source, MeetingSource):
                target.source = self.source
        self.a, self.b = self.targets[:2]
        self.fleet = ReplicaFleet(
            self.targets,  # pyright: ignore
            8,
            min_replicas,
            lambda event: self.events.append(event.text),
            serving=0,
        )
        self.router = self.fleet.router
        self.manager = CheckpointManager(self.source, self.fleet, WeightSyncConfig(staging=staging, **DEADLINES))

    def update(self, *versions: int) -> list[UpdateReport]:
        async def main() -> list[UpdateReport]:
            return [await self.train_and_update(version) for version in versions]

        return run_virtual(main())

    async def train_and_update(self, version: int) -> UpdateReport:
        self.source.global_steps = version
        return await self.manager.update_weights(version)

    def of(self, name: str) -> list[str]:
        return [event.removeprefix(f"{name}.") for event in self.events if event.startswith(f"{name}.")]

    def of_fleet(self) -> list[str]:
        """Return what the fleet reported."""
        return [event for event in self.events if " " in event.replace(" done", "").replace(" cancelled", "")]
