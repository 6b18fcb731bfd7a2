"""One replica that fails while the trainer sends: the others, who would wait for it, are told at once."""

import asyncio

import pytest

from configs.schema import WeightSyncConfig
from rollout.fleet.fleet import ReplicaFleet
from rollout.router import ReplicaRouter
from tests.support.fakes import now, run_virtual
from tests.unit.weight_sync.test_checkpoint_manager import DEADLINES, FakeSource, FakeTarget, Scene
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import Manifest, PublishOrder

BROKEN = OSError("broken")


class MeetingSource(FakeSource):
    """It sends when all receivers have come, and they wait for one another."""

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
    def __init__(self, name: str, events: list[str], source: MeetingSource):
        super().__init__(name, events)
        self._source = source

    async def stage(self, manifest: Manifest) -> None:
        await super().stage(manifest)
        self._source.missing.discard(self.name)
        if not self._source.missing:
            self._source.met.set_result(None)
        await asyncio.shield(self._source.met)


@pytest.mark.parametrize(("num_faults", "served"), [(1, "acb"), (2, "ac")])
def test_one_that_does_not_come_keeps_the_others_waiting_neither_now_nor_in_the_second_try(
    num_faults: int, served: str
) -> None:
    async def main() -> None:
        events: list[str] = []
        source = MeetingSource("trainer", events)
        targets = [MeetingTarget(name, events, source) for name in "abc"]
        targets[1].faults = {"stage": [BROKEN] * num_faults, "status": [BROKEN]}
        router = ReplicaRouter(["a", "b", "c"], 8)
        fleet = ReplicaFleet(targets, router, 1, events.append, serving=0)  # pyright: ignore
        manager = CheckpointManager(source, fleet, WeightSyncConfig(**DEADLINES))
        report = await manager.update_weights(1)
        assert now() < 1, "nobody waited for a deadline"
        assert [update.name for update in report.replicas] == list(served)
        assert router.healthy == sorted(served)
        assert [receivers for receivers, _ in source.orders] == [{"a": 1, "b": 1, "c": 1}, {"a": 1, "c": 1}, {"b": 1}]
        assert "b is out of service: stage on b failed: OSError: broken" in events

    run_virtual(main())


def test_who_has_staged_when_the_sending_is_stopped_is_told_why() -> None:
    scene = Scene()
    scene.source.seconds["send"], scene.b.seconds["stage"], scene.b.faults["stage"] = 50, 5, [BROKEN]
    [report] = scene.update(1)
    assert report.failures == 2 and scene.router.healthy == ["a", "b"]
    assert "a is out of service: send on trainer was stopped: b failed" in scene.events
    assert [event for event in scene.of("trainer") if "send " in event] == ["send cancelled"] + 2 * ["send done"]


def test_two_that_fail_in_turn_cost_the_others_nothing_and_are_tried_once_more_each() -> None:
    """b fails, then c, which b's failure had stopped. b is well again; c fails once more, and the next update too."""

    async def main() -> None:
        events: list[str] = []
        source = MeetingSource("trainer", events)
        targets = [MeetingTarget(name, events, source) for name in "abcd"]
        router = ReplicaRouter(list("abcd"), 8)
        fleet = ReplicaFleet(targets, router, 1, events.append, serving=0)  # pyright: ignore
        manager = CheckpointManager(source, fleet, WeightSyncConfig(**DEADLINES))
        for version in (1, 2):
            targets[1].faults, targets[2].faults = {"stage": [BROKEN]}, {"stage": [BROKEN] * 3}
            report = await manager.update_weights(version)
            assert sorted(update.name for update in report.replicas) == ["a", "b", "d"]
            assert router.healthy == ["a", "b", "d"]
        assert [event for event in events if "given up" in event] == [
            "c is given up: stage on c failed: OSError: broken"
        ]

    run_virtual(main())
