"""The weight update as a transaction, as the order of its events. What may fail is in test_update_failures."""

import asyncio
from types import SimpleNamespace

import pytest

from configs.schema import Staging
from tests.support.fakes import run_virtual, settle
from tests.support.updates import WHOLE, Scene
from weight_sync.checkpoint_manager import WeightUpdateError

BOTH, ONLY_B = {"a": 1, "b": 1}, {"b": 1}
OUT = OSError("out")


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


# -- replicas that catch up with the trainer, and take the others along so that no version descends --------------------


def versions(scene: Scene) -> tuple[int, int]:
    return scene.a.state.global_steps, scene.b.state.global_steps


def test_where_the_others_have_the_trainers_present_weights_only_those_named_are_brought_up(scene: Scene) -> None:
    async def main() -> None:
        await scene.manager.update_weights(7)
        await scene.fleet.eject("b", OUT)
        scene.events.clear()
        report = await scene.manager.catch_up(["b"])
        assert report is not None and report.global_steps == scene.source.global_steps == 7
        assert [update.name for update in report.replicas] == ["b"]

    run_virtual(main())
    assert (scene.of("a"), scene.of("b")) == ([], WHOLE) and scene.router.healthy == ["a", "b"]
    assert scene.source.orders[1:] == [(ONLY_B, None)], "a replica may be new under an old name: no base"


def test_where_the_trainer_is_ahead_of_the_others_they_are_taken_along(scene: Scene) -> None:
    scene.a.seconds["stage"] = 5

    async def main() -> None:
        await scene.manager.update_weights(6)
        await scene.fleet.eject("b", OUT)
        catching_up = asyncio.create_task(scene.manager.catch_up(["b"]))
        await asyncio.sleep(4)
        assert versions(scene) == (6, 7) and scene.router.healthy == ["a"], "b waits for a"
        assert await catching_up is not None
        assert versions(scene) == (7, 7) and scene.router.healthy == ["a", "b"]
        assert scene.source.orders == [(BOTH, None), (BOTH, None)]
        await scene.manager.catch_up(["b"])
        assert scene.source.orders[2:] == [(ONLY_B, None)], "a has it by now"

    run_virtual(main())


def test_who_is_pinned_is_not_taken_along(scene: Scene) -> None:
    async def main() -> None:
        await scene.manager.update_weights(6)
        assert await scene.fleet.pin(1, "it evaluates") == ["b"]
        await scene.manager.catch_up(["a"])
        assert versions(scene) == (7, 6) and scene.router.healthy == ["a"]

    run_virtual(main())


def test_between_a_step_and_its_update_too(scene: Scene) -> None:
    """The step holds `publishing`, and who waits for it comes before the update that follows."""

    async def main() -> None:
        await scene.manager.update_weights(7)
        await scene.fleet.eject("b", OUT)
        async with scene.manager.publishing:
            catching_up = asyncio.create_task(scene.manager.catch_up(["b"]))
            await settle()
            scene.source.global_steps = 8
        await catching_up
        assert versions(scene) == (8, 8)

    run_virtual(main())


def test_catching_up_waits_for_an_update_under_way_and_the_next_update_for_it(scene: Scene) -> None:
    scene.b.seconds["stage"] = 5

    async def main() -> None:
        updates = scene.manager.update_weights(7), scene.manager.catch_up(["b"]), scene.manager.update_weights(8)
        await asyncio.gather(*updates)

    run_virtual(main())
    assert scene.of("trainer") == ["publish", "publish done", "send", "send done"] * 3
    assert (scene.of("a"), scene.of("b")) == (WHOLE * 2, WHOLE * 3)
    assert [base for _, base in scene.source.orders] == [None, None, 7]


def test_who_fails_to_catch_up_twice_stays_out_and_who_is_gone_is_left_alone(scene: Scene) -> None:
    async def main() -> None:
        await scene.manager.update_weights(7)
        await scene.fleet.eject("b", OUT)
        scene.b.faults["stage"] = [OSError(), OSError()]
        report = await scene.manager.catch_up(["b"])
        assert report is not None and (report.failures, report.replicas) == (2, ())
        assert scene.router.healthy == ["a"] and scene.fleet.targets == [scene.a, scene.b]
        await scene.fleet.lose("b", OSError("died"))
        assert await scene.manager.catch_up(["b"]) is None
        assert len(scene.source.orders) == 3

    run_virtual(main())


@pytest.mark.parametrize(("sendings", "publications"), [([], [OUT]), ([OUT], [None, OUT])])
def test_when_it_is_done_again_after_the_trainer_failed_nobody_is_left_behind(
    sendings: list[OSError], publications: list[OSError | None], scene: Scene
) -> None:
    """As when a train worker is lost: before anything was sent, or in it, so that all are out of service."""

    async def main() -> None:
        await scene.manager.update_weights(6)
        await scene.fleet.eject("b", OUT)
        scene.source.faults = {"send": sendings, "publish": publications}
        with pytest.raises(WeightUpdateError, match="publish on trainer failed"):
            await scene.manager.catch_up(["b"])
        assert versions(scene) == (6, 6)
        await scene.manager.catch_up(["b"])
        assert versions(scene) == (7, 7) and scene.router.healthy == ["a", "b"]

    run_virtual(main())
