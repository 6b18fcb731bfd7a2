"""Fleets of replicas on simulated engines and a virtual clock: as they are, and with an operator and a monitor."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from configs.schema import WeightSyncConfig
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.health import FleetMonitor, HealthMonitor
from rollout.fleet.operator import FleetOperator
from rollout.replica.replica import RolloutReplica
from tests.support.fakes import AsyncTest, ClockedEngine, as_test, make_replica, now, settle, start_group, update
from tests.support.updates import FakeSource
from weight_sync.checkpoint_manager import CheckpointManager

START_S, DRAIN_S = 10.0, 100.0
DIED = OSError("out of memory")


class FleetSetup:
    """Replicas a, b, ... on version 0, with what the fleet told."""

    def __init__(self, num_replicas: int, min_replicas: int):
        names = "abc"[:num_replicas]
        self.told: list[str] = []
        self.engines = {name: ClockedEngine() for name in names}
        self.replicas = {name: make_replica(name, engine) for name, engine in self.engines.items()}
        self.fleet = ReplicaFleet(
            list(self.replicas.values()),
            8,
            min_replicas,
            lambda event: self.told.append(event.text),
            serving=0,
        )
        self.router = self.fleet.router
        self.control = FleetControl(self.fleet)

    def start(self, *lengths: int, prefix: str = "") -> dict[str, asyncio.Task[Any]]:
        """A group on every replica; its requests are a0, a1, ..."""
        return {name: start_group(r, *lengths, prefix=f"{prefix}{name}") for name, r in self.replicas.items()}

    async def paused(self) -> dict[str, str | None]:
        return {status.name: status.pause_mode for status in await self.control.statuses()}


def on_fleet(num_replicas: int = 2, min_replicas: int = 1) -> Callable[[AsyncTest], Callable[..., None]]:
    """Makes a test of `async def test(setup, ...)`."""

    @asynccontextmanager
    async def given() -> AsyncIterator[tuple[FleetSetup]]:
        setup = FleetSetup(num_replicas, min_replicas)
        for name, replica in setup.replicas.items():
            await update(replica, 0)
            setup.engines[name].events.clear()
        yield (setup,)

    return partial(as_test, 1, given)


class OperatedFleet:
    """Replicas replica-0, replica-1 on version 7; a new one takes 10 s to start."""

    running: "asyncio.Future[Any]"
    """Operator and monitor."""

    def __init__(self, min_replicas: int = 1, max_replacements: int = 2):
        self.told: list[str] = []
        self.events: list[str] = []
        self.failures: list[Exception] = []
        self.replicas = {name: self.make(name) for name in ("replica-0", "replica-1")}
        self.fleet = ReplicaFleet(
            list(self.replicas.values()),
            8,
            min_replicas,
            lambda event: self.told.append(event.text),
            max_replacements=max_replacements,
        )
        self.router = self.fleet.router
        self.control = FleetControl(self.fleet)
        self.source = FakeSource("trainer", self.events)
        self.manager = CheckpointManager(self.source, self.fleet, WeightSyncConfig())
        self.monitor = FleetMonitor(self.fleet, HealthMonitor(60.0, None), 1.0)
        self.operator = FleetOperator(
            fleet=self.fleet,
            control=self.control,
            start=self.start,
            catch_up=self.catch_up,
            drain_timeout_s=DRAIN_S,
        )

    def make(self, name: str) -> RolloutReplica:
        return RolloutReplica(name, ClockedEngine(), WeightSyncConfig())

    async def start(self, name: str) -> RolloutReplica:
        self.events.append(f"start {name} at {now():g}")
        try:
            await asyncio.sleep(START_S)
        except asyncio.CancelledError:
            self.events.append(f"start of {name} cancelled")
            raise
        if self.failures:
            raise self.failures.pop(0)
        self.replicas[name] = self.make(name)
        return self.replicas[name]

    async def catch_up(self, names: Collection[str]) -> None:
        self.events.append(f"catch up {' '.join(names)}; routable: {' '.join(self.router.healthy)}")
        await self.manager.catch_up(names)

    def states(self) -> dict[str, str]:
        return {name: replica.state.value for name, replica in self.fleet.replicas.items()}


def operated(*, fails: bool = False, **options: int) -> Callable[[AsyncTest], Callable[..., None]]:
    """Makes a test of `async def test(setup, ...)`."""

    @asynccontextmanager
    async def given() -> AsyncIterator[tuple[OperatedFleet]]:
        setup = OperatedFleet(**options)
        assert setup.router.healthy == [], "nothing is routed before the first weights"
        await setup.manager.update_weights(7)
        setup.running = asyncio.gather(setup.operator.run(), setup.monitor.run())
        await settle()
        yield (setup,)
        await asyncio.sleep(3 * START_S)  # whoever is on its way arrives
        setup.running.cancel()
        with pytest.raises(ExceptionGroup if fails else asyncio.CancelledError):
            await setup.running

    return partial(as_test, 1, given)
