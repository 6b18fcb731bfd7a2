"""The weight update as a transaction, told by the order of its events. What may fail is in test_update_failures."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import Staging, WeightSyncConfig
from rollout.fleet.fleet import ReplicaFleet
from rollout.router import ReplicaRouter
from tests.support.fakes import make_manifest, make_tag, run_virtual
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import CommitReport, Manifest, PublishOrder, ReplicaStatus, UpdateReport, WeightTag

DEADLINES = {"stage_timeout_s": 100.0, "pause_timeout_s": 10.0, "swap_timeout_s": 50.0}
HANGS = "hangs"


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
    """What it says it sent; None is the truth."""

    def __init__(self, name: str, events: list[str]):
        super().__init__(name, events)
        self.orders: list[tuple[Any, int | None]] = []

    async def publish(self, order: PublishOrder) -> Manifest:
        self.orders.append((order.receivers, order.base))
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
        self.set_state(-1, torn=False)

    def set_state(self, version: int, torn: bool) -> None:
        frozen = self.frozen or torn
        self.state = ReplicaStatus(
            name=self.name, global_steps=version, pause_mode=self.pause_mode, torn=torn, frozen=frozen
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
            self.set_state(tag.global_steps, torn)
        return CommitReport(pause_s=self.frozen_s, swap_s=self.frozen_s / 2)

    async def receive(self, manifest: Manifest) -> CommitReport:
        await self._do("receive")
        self.set_state(manifest.global_steps, torn=False)
        return CommitReport(pause_s=self.frozen_s, swap_s=self.frozen_s / 2)

    async def status(self) -> ReplicaStatus:
        await self._do("status")
        return self.state

    async def progress(self, known: object) -> None:
        raise OSError("it tells nothing")

    def kill(self) -> None:
        self._events.append(f"{self.name}.kill")


class Scene:
    """A source and two replicas; what they and the fleet did, in order. One replica is enough."""

    def __init__(self, staging: Staging = Staging.host) -> None:
        self.events: list[str] = []
        self.source = FakeSource("trainer", self.events)
        self.a, self.b = FakeTarget("a", self.events), FakeTarget("b", self.events)
        self.router = ReplicaRouter(["a", "b"], max_inflight=8)
        self.fleet = ReplicaFleet([self.a, self.b], self.router, 1, self.events.append, serving=0)  # pyright: ignore
        self.manager = CheckpointManager(self.source, self.fleet, WeightSyncConfig(staging=staging, **DEADLINES))

    def update(self, *versions: int | None) -> list[UpdateReport]:
        async def main() -> list[UpdateReport]:
            return [await self.manager.update_weights(version) for version in versions]

        return run_virtual(main())

    def of(self, name: str) -> list[str]:
        return [event.removeprefix(f"{name}.") for event in self.events if event.startswith(f"{name}.")]


WHOLE = ["stage", "stage done", "commit", "commit done"]


@pytest.fixture
def scene() -> Scene:
    return Scene()


# -- order -------------------------------------------------------------------------------------------------------------


def test_weights_are_published_then_sent_and_staged_side_by_side_and_then_committed(scene: Scene) -> None:
    scene.source.seconds["send"] = 5
    scene.update(1)
    assert scene.events[:2] == ["trainer.publish", "trainer.publish done"]
    assert sorted(scene.events[2:5]) == ["a.stage", "b.stage", "trainer.send"]
    assert scene.of("a") == scene.of("b") == WHOLE
    assert scene.events.index("trainer.send done") < scene.events.index("a.commit"), "its checksum is verified then"
    assert scene.events[-2:] == ["a.commit done", "b.commit done"]


def test_without_staging_they_are_sent_while_the_replicas_commit() -> None:
    scene = Scene(Staging.none)
    scene.source.seconds["send"] = 5
    scene.update(1)
    assert scene.of("a") == scene.of("b") == ["receive", "receive done"]
    assert scene.events.index("b.receive") < scene.events.index("trainer.send done") == len(scene.events) - 1


@pytest.mark.parametrize("slow", ["stage", "commit"])
def test_replicas_do_not_wait_for_one_another(slow: str, scene: Scene) -> None:
    scene.b.seconds[slow] = 9
    scene.update(1)
    assert scene.events.index("a.commit done") < scene.events.index(f"b.{slow} done")


def test_two_updates_at_once_come_one_after_the_other(scene: Scene) -> None:
    scene.source.seconds["publish"] = scene.b.seconds["stage"] = 5

    async def main() -> list[UpdateReport]:
        return await asyncio.gather(scene.manager.update_weights(1), scene.manager.update_weights(2))

    assert [report.global_steps for report in run_virtual(main())] == [1, 2]
    assert scene.of("trainer") == ["publish", "publish done", "send", "send done"] * 2
    assert scene.of("b") == WHOLE * 2


def test_without_a_version_it_is_the_trainers_latest(scene: Scene) -> None:
    scene.source.global_steps = 12
    [report] = scene.update(None)
    assert report.global_steps == scene.a.state.global_steps == scene.b.state.global_steps == 12


# -- who receives, and on top of which version -------------------------------------------------------------------------


def test_the_source_is_told_who_receives_and_which_version_all_of_them_hold(scene: Scene) -> None:
    scene.b.num_workers = 4
    scene.update(3, 5, 6)
    assert scene.source.orders == [({"a": 1, "b": 4}, base) for base in (None, 3, 5)]


def test_after_a_failure_the_base_is_known_again_only_when_all_hold_the_same_verified_version(scene: Scene) -> None:
    scene.b.faults["stage"] = [None, OSError(), OSError(), None, OSError()]
    scene.update(1, 2, 3, 4, 5)
    both, only_b = {"a": 1, "b": 1}, {"b": 1}
    assert scene.source.orders == [
        (both, None),
        (both, 1),  # stage on b fails
        (only_b, None),  # and again: b stays out, on version 1
        (both, None),  # a holds 2, b nothing that is known
        (both, 3),  # stage on b fails
        (only_b, None),
        (both, 4),
    ]


def test_a_replica_that_is_gone_does_not_keep_the_others_from_a_base(scene: Scene) -> None:
    async def main() -> None:
        await scene.manager.update_weights(1)
        await scene.fleet.lose("b", OSError("died"))
        await scene.manager.update_weights(2)

    run_virtual(main())
    assert scene.source.orders[1:] == [({"a": 1}, 1)]


# -- report ------------------------------------------------------------------------------------------------------------


def test_the_report_has_the_seconds_of_every_phase(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("weight_sync.checkpoint_manager.time", clock)
    scene.source.seconds = {"publish": 3, "send": 12}
    scene.a.frozen_s, scene.b.frozen_s = 6, 4.5
    scene.a.seconds = {"stage": 10, "commit": 8}  # has its checksum after 12
    scene.b.seconds = {"stage": 20, "commit": 5}
    [report] = scene.update(7)
    assert (report.global_steps, report.nbytes, report.publish_s, report.total_s) == (7, 3_000_000, 3, 28)
    assert [(u.name, u.stage_s, u.pause_s, u.swap_s) for u in report.replicas] == [
        ("a", 12, 6, 3),
        ("b", 20, 4.5, 2.25),
    ]
    assert report.gauges() == {
        "weight_sync/pause_ms": 6000,
        "weight_sync/swap_ms": 3000,
        "weight_sync/stage_ms": 20000,
        "weight_sync/publish_ms": 3000,
        "weight_sync/total_ms": 28000,
        "weight_sync/megabytes": 3,
        "weight_sync/failures": 0,
    }
