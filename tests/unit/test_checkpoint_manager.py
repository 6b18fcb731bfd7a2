"""The weight update as a transaction, told by the order of its events."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import WeightSyncConfig
from rollout.engines.base import WeightTag
from rollout.replica import RolloutReplica
from tests.fakes import ClockedEngine, make_manifest, make_request, run_virtual
from weight_sync.checkpoint_manager import CheckpointManager, UpdateReport, WeightUpdateError

CONFIG = WeightSyncConfig(stage_timeout_s=100, pause_timeout_s=10, swap_timeout_s=50)
DEADLINE_OF = {
    "publish": "stage_timeout_s=100",
    "stage": "stage_timeout_s=100",
    "pause": "pause_timeout_s=10",
    "swap": "swap_timeout_s=50",
    "resume": "pause_timeout_s=10",
    "release": "stage_timeout_s=100",
}
OF_A_REPLICA = ("stage", "pause", "swap", "resume")


class FakePart:
    """Every phase takes `seconds[phase]`, then fails with `errors[phase]`. Events: "<name>.<phase>", and "... done"."""

    def __init__(self, name: str, events: list[str]):
        self.name = name
        self.seconds: dict[str, float] = {}
        self.errors: dict[str, Exception] = {}
        self._events = events

    async def _do(self, phase: str) -> None:
        self._events.append(f"{self.name}.{phase}")
        await asyncio.sleep(self.seconds.get(phase, 0))
        if phase in self.errors:
            raise self.errors[phase]
        self._events.append(f"{self.name}.{phase} done")


class FakeSource(FakePart):
    async def publish(self, global_steps: int) -> dict[str, Any]:
        await self._do("publish")
        return make_manifest(global_steps) | {"nbytes": 3_000_000}

    async def release(self, manifest: dict[str, Any]) -> None:
        await self._do("release")


class FakeTarget(FakePart):
    tags: list[WeightTag] | None = None
    """What the workers say after a swap; None is the truth."""
    frozen_s: float = 0.0

    async def stage(self, manifest: dict[str, Any]) -> None:
        await self._do("stage")
        self._staged = manifest

    async def pause(self) -> None:
        await self._do("pause")

    async def swap(self, global_steps: int) -> list[WeightTag]:
        await self._do("swap")
        return [WeightTag(global_steps, self._staged["checksum"])] * 2 if self.tags is None else self.tags

    async def resume(self) -> float:
        await self._do("resume")
        return self.frozen_s


class Scene:
    """A source, two targets and their events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.source = FakeSource("trainer", self.events)
        self.a, self.b = FakeTarget("a", self.events), FakeTarget("b", self.events)
        self.manager = CheckpointManager(self.source, [self.a, self.b], CONFIG)

    def part(self, phase: str) -> FakePart:
        return self.b if phase in OF_A_REPLICA else self.source

    def update(self, global_steps: int = 1) -> UpdateReport:
        return run_virtual(self.manager.update_weights(global_steps))

    def fail(self) -> str:
        with pytest.raises(WeightUpdateError) as raised:
            self.update()
        return str(raised.value)

    def of(self, name: str) -> list[str]:
        return [event.removeprefix(f"{name}.") for event in self.events if event.startswith(f"{name}.")]


WHOLE_UPDATE = [event for phase in OF_A_REPLICA for event in (phase, f"{phase} done")]


@pytest.fixture
def scene() -> Scene:
    return Scene()


# -- order -------------------------------------------------------------------------------------------------------------


def test_a_replica_stages_pauses_swaps_and_resumes_in_this_order(scene: Scene) -> None:
    scene.update()
    assert scene.of("a") == scene.of("b") == WHOLE_UPDATE
    assert scene.events[:2] == ["trainer.publish", "trainer.publish done"]
    assert scene.events[-2:] == ["trainer.release", "trainer.release done"]


@pytest.mark.parametrize("slow", OF_A_REPLICA)
def test_replicas_do_not_wait_for_one_another(slow: str, scene: Scene) -> None:
    scene.b.seconds[slow] = 9
    scene.update()
    assert scene.events.index("a.resume done") < scene.events.index(f"b.{slow} done")


def test_real_replicas_generate_through_an_update_and_then_serve_the_new_version(scene: Scene) -> None:
    async def main() -> None:
        replicas = [RolloutReplica(name, ClockedEngine()) for name in ("a", "b")]
        manager = CheckpointManager(scene.source, replicas, CONFIG)
        await manager.update_weights(0)
        groups = [asyncio.create_task(r.generate_group([make_request(r.name, 5)])) for r in replicas]
        await asyncio.sleep(1.5)
        await manager.update_weights(1)
        assert {replica.global_steps for replica in replicas} == {1}
        for group in groups:
            [completion] = await group
            assert completion.token_ids.tolist() == [0, 0, 1, 1, 1]

    run_virtual(main())


def test_two_updates_at_once_come_one_after_the_other(scene: Scene) -> None:
    scene.source.seconds["publish"] = scene.b.seconds["stage"] = 5

    async def main() -> list[UpdateReport]:
        return await asyncio.gather(scene.manager.update_weights(1), scene.manager.update_weights(2))

    assert [report.global_steps for report in run_virtual(main())] == [1, 2]
    assert scene.of("trainer") == ["publish", "publish done", "release", "release done"] * 2
    assert scene.events[: len(scene.events) // 2].count("trainer.release done") == 1
    assert scene.of("b") == WHOLE_UPDATE * 2


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tags",
    [
        [],
        [WeightTag(0, 1001)],
        [WeightTag(1, 1000)],
        [WeightTag(1, 1001), WeightTag(0, 1001)],
        [WeightTag(1, 1001), WeightTag(1, 7)],
    ],
    ids=["no worker", "old version", "wrong bytes", "second worker old", "second worker wrong bytes"],
)
def test_a_replica_that_is_not_verified_is_never_resumed(tags: list[WeightTag], scene: Scene) -> None:
    scene.b.tags = tags
    message = scene.fail()
    assert message.startswith("verify on b failed: workers serve [") and message.endswith("published was (1, 1001)")
    assert "resume" not in scene.of("b")
    assert scene.of("a") == WHOLE_UPDATE


@pytest.mark.parametrize("phase", DEADLINE_OF)
def test_a_phase_that_raises_is_named_with_its_replica_and_reason(phase: str, scene: Scene) -> None:
    scene.part(phase).errors[phase] = ValueError("no such tensor")
    assert scene.fail() == f"{phase} on {scene.part(phase).name} failed: ValueError: no such tensor"


@pytest.mark.parametrize("phase", DEADLINE_OF)
def test_a_phase_past_its_deadline_is_named_with_its_replica_and_key(phase: str, scene: Scene) -> None:
    scene.part(phase).seconds[phase] = 101
    message = f"{phase} on {scene.part(phase).name} took longer than weight_sync.{DEADLINE_OF[phase]}"
    assert scene.fail() == message


@pytest.mark.parametrize("phase", DEADLINE_OF)
def test_a_timeout_inside_a_phase_is_not_taken_for_its_deadline(phase: str, scene: Scene) -> None:
    scene.part(phase).errors[phase] = TimeoutError("connection timed out")
    assert scene.fail() == f"{phase} on {scene.part(phase).name} failed: TimeoutError: connection timed out"


@pytest.mark.parametrize("phase", OF_A_REPLICA)
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_after_a_failure_a_replica_goes_no_further_and_the_others_finish(phase: str, how: str, scene: Scene) -> None:
    """No other replica is left half-way, and the weights are released only when nobody reads them any more."""
    if how == "raises":
        scene.b.errors[phase] = OSError()
    else:
        scene.b.seconds[phase] = 1e6
    scene.a.seconds = {"stage": 7, "swap": 7}
    scene.fail()
    assert scene.of("b") == WHOLE_UPDATE[: WHOLE_UPDATE.index(phase) + 1]
    assert scene.of("a") == WHOLE_UPDATE
    assert scene.events[-2:] == ["trainer.release", "trainer.release done"]


def test_all_failures_are_told(scene: Scene) -> None:
    scene.a.errors["stage"], scene.b.errors["swap"] = OSError("first"), OSError("second")
    with pytest.raises(WeightUpdateError, match="stage on a failed: OSError: first") as raised:
        scene.update()
    assert raised.value.__notes__ == ["also: swap on b failed: OSError: second"]


def test_without_published_weights_no_replica_is_touched(scene: Scene) -> None:
    scene.source.errors["publish"] = OSError("disk full")
    scene.fail()
    assert scene.events == ["trainer.publish"]


def test_a_cancelled_update_releases_the_weights(scene: Scene) -> None:
    scene.b.seconds["stage"] = 50

    async def main() -> None:
        task = asyncio.create_task(scene.manager.update_weights(1))
        await asyncio.sleep(20)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run_virtual(main())
    assert scene.of("trainer")[-2:] == ["release", "release done"]


def test_after_a_failed_update_another_can_be_made(scene: Scene) -> None:
    async def main() -> UpdateReport:
        scene.b.errors["stage"] = OSError()
        with pytest.raises(WeightUpdateError):
            await scene.manager.update_weights(1)
        scene.b.errors.clear()
        return await scene.manager.update_weights(2)

    assert run_virtual(main()).global_steps == 2


# -- report ------------------------------------------------------------------------------------------------------------


def test_the_report_has_the_seconds_of_every_phase(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("weight_sync.checkpoint_manager.time", clock)
    scene.source.seconds = {"publish": 3, "release": 1}
    scene.a.frozen_s, scene.b.frozen_s = 6, 4.5
    scene.a.seconds = {"stage": 10, "pause": 2, "swap": 5, "resume": 1}
    scene.b.seconds = {"stage": 20, "pause": 0.5, "swap": 4, "resume": 0.5}
    report = scene.update(7)
    assert (report.global_steps, report.nbytes, report.publish_s, report.total_s) == (7, 3_000_000, 3, 29)
    assert [(u.name, u.stage_s, u.pause_s, u.swap_s) for u in report.replicas] == [("a", 10, 6, 5), ("b", 20, 4.5, 4)]
    assert report.gauges() == {
        "weight_sync/pause_ms": 6000,
        "weight_sync/swap_ms": 5000,
        "weight_sync/stage_ms": 20000,
        "weight_sync/publish_ms": 3000,
        "weight_sync/total_ms": 29000,
        "weight_sync/megabytes": 3,
    }


def test_every_deadline_of_the_config_is_tested_here() -> None:
    tested = {deadline.partition("=")[0] for deadline in DEADLINE_OF.values()}
    assert tested == {key for key in WeightSyncConfig.__dataclass_fields__ if key.endswith("_timeout_s")}
