"""The weight update as a transaction, as the order of its events. What may fail is in test_update_failures."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import Staging
from tests.support.fakes import now, run_virtual, settle
from tests.support.updates import WHOLE, Scene
from weight_sync.protocol import WeightUpdateError

BOTH, ONLY_B = {"a": 1, "b": 1}, {"b": 1}
OUT = OSError("out")


@pytest.fixture
def scene() -> Scene:
    return Scene()


def versions(scene: Scene) -> tuple[int, int]:
    return scene.a.state.global_steps, scene.b.state.global_steps


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
    assert scene.source.orders == [
        (BOTH, None),
        (BOTH, 1),  # stage on b fails
        (ONLY_B, None),  # and again: b stays out, on version 1
        (BOTH, None),  # a holds 2, b nothing that is known
        (BOTH, 3),  # stage on b fails
        (ONLY_B, None),
        (BOTH, 4),
    ]
    assert scene.source.had_new == [True, False, True, True, False, True, False], "whoever failed may hold nothing"


async def test_replicas_of_different_versions_are_not_new(scene: Scene) -> None:
    scene.a.seconds["stage"] = 5
    await scene.train_and_update(6)
    scene.source.global_steps = 7
    catching_up = asyncio.create_task(scene.manager.catch_up(["b"]))
    await catching_up
    await scene.train_and_update(8)
    assert scene.source.orders[2] == (BOTH, 7)
    scene.fleet.replicas["a"].version = 6  # as one that evaluated meanwhile
    await scene.train_and_update(9)
    assert scene.source.orders[3] == (BOTH, None), "they hold no common version"
    assert scene.source.had_new == [True, True, False, False]


async def test_a_replica_that_is_gone_does_not_keep_the_others_from_a_base(scene: Scene) -> None:
    await scene.train_and_update(1)
    await scene.fleet.lose("b", OSError("died"))
    await scene.train_and_update(2)
    assert scene.source.orders[1:] == [({"a": 1}, 1)]


# -- the trainer goes on once its weights are published ----------------------------------------------------------------


async def train(scene: Scene, seconds: float) -> float:
    """Takes one optimizer step as soon as the weights may change, and returns when it began."""
    await settle()
    async with scene.manager.publishing:
        began = now()
        await asyncio.sleep(seconds)
        scene.source.global_steps += 1
    return began


async def test_published_is_set_when_the_trainers_weights_have_been_sent_and_the_replicas_still_stage(
    scene: Scene,
) -> None:
    scene.source.seconds, scene.source.global_steps = {"publish": 3, "send": 2}, 1
    scene.a.seconds["stage"] = scene.b.seconds["stage"] = 50
    published = asyncio.Event()
    updating = asyncio.create_task(scene.manager.update_weights(1, published))
    assert await train(scene, 10) == 5 and published.is_set()
    assert scene.manager.updating.locked() and versions(scene) == (-1, -1)
    await updating
    assert versions(scene) == (1, 1) and now() == 53, "with the weights that were published"


async def test_weights_that_have_to_be_sent_again_keep_the_trainer_waiting(scene: Scene) -> None:
    scene.source.seconds, scene.source.faults = {"send": 5}, {"send": [OUT]}
    scene.source.global_steps = 1
    published = asyncio.Event()
    updating = asyncio.create_task(scene.manager.update_weights(1, published))
    await published.wait()
    assert now() == 10
    await updating
    assert versions(scene) == (1, 1)


async def test_who_fails_while_the_trainer_is_at_its_next_step_waits_for_the_next_update(scene: Scene) -> None:
    """Everything that waits for this update, above all the slots, would else wait for that step."""
    scene.b.faults["stage"], scene.b.seconds["stage"] = [OUT], 4
    scene.source.global_steps = 7
    updating = asyncio.create_task(scene.manager.update_weights(7))
    training = asyncio.create_task(train(scene, 1000))
    report = await updating
    assert now() == 4 and (report.global_steps, report.failures) == (7, 1)
    assert scene.router.healthy == ["a"] and versions(scene) == (7, -1)
    await training
    await scene.manager.update_weights(8)
    assert scene.router.healthy == ["a", "b"] and versions(scene) == (8, 8)


async def test_where_the_run_cannot_do_without_it_all_get_the_trainers_present_weights_after_its_step() -> None:
    """All get one version, because b's tokens may be continued by a. The second attempt waits for the step, however
    long."""
    scene = Scene(min_replicas=2)
    scene.b.faults["stage"], scene.b.seconds["stage"] = [OUT], 4
    scene.source.global_steps = 7
    updating = asyncio.create_task(scene.manager.update_weights(7))
    await train(scene, 1000)
    report = await updating
    assert (report.global_steps, report.failures) == (8, 1) and versions(scene) == (8, 8)
    assert sorted(update.name for update in report.replicas) == ["a", "b"]
    assert scene.source.orders == [(BOTH, None), (BOTH, None)] and scene.router.healthy == ["a", "b"]
    published = asyncio.Event()
    report = await scene.manager.update_weights(8, published)
    assert published.is_set() and (report.global_steps, report.gauges()) == (8, {}), "nobody needs it"
    assert len(scene.source.orders) == 2


async def test_who_failed_twice_is_not_tried_a_third_time_because_the_trainer_went_on() -> None:
    scene = Scene(names="abc", meeting=True, min_replicas=2)
    scene.b.faults, scene.source.global_steps = {"stage": [OUT] * 3}, 7
    scene.source.seconds["publish"] = 5
    updating = asyncio.create_task(scene.manager.update_weights(7))
    await train(scene, 1)
    await updating
    assert len(scene.b.faults["stage"]) == 1 and scene.router.healthy == ["a", "c"]
    assert len({scene.a.state.global_steps, scene.targets[2].state.global_steps}) == 1


async def test_an_update_that_finds_another_catching_up_publishes_with_it(scene: Scene) -> None:
    """Else the trainer would wait until the weights that it needs to publish are live."""
    scene.a.seconds["commit"] = 60
    await scene.train_and_update(6)
    await scene.fleet.eject("b", OUT)
    scene.source.global_steps = 7
    catching_up = asyncio.create_task(scene.manager.catch_up(["b"]))
    await settle()
    started, published = now(), asyncio.Event()
    updating = asyncio.create_task(scene.manager.update_weights(7, published))
    await published.wait()
    assert now() - started < 1 and versions(scene)[0] == 6
    await catching_up
    assert (await updating).gauges() == {} and versions(scene) == (7, 7)


async def test_who_catches_up_waits_for_the_step_under_way_without_keeping_others_from_the_fleet(scene: Scene) -> None:
    await scene.train_and_update(7)
    await scene.fleet.eject("b", OUT)
    training, begun = asyncio.create_task(train(scene, 100)), asyncio.Event()
    await settle()
    catching_up = asyncio.create_task(scene.manager.catch_up(["b"], lambda names: begun.set()))
    await settle()
    async with scene.manager.updating:  # as an evaluation that is due takes its replicas
        assert now() == 0 and not begun.is_set()
    await training
    await catching_up
    assert begun.is_set() and versions(scene) == (8, 8)


@pytest.mark.parametrize("version", [None, -1, 1.5, "7", True])
async def test_what_is_no_version_is_refused_with_the_reason(scene: Scene, version: Any) -> None:
    with pytest.raises(ValueError, match=f"^global_steps={version!r}: must be a whole number, the steps"):
        await scene.manager.update_weights(version)
    assert not scene.source.orders


def test_weights_that_the_trainer_does_not_have_yet_are_refused(scene: Scene) -> None:
    scene.source.global_steps = 6
    with pytest.raises(ValueError, match=r"update_weights\(7\): the trainer is at version 6"):
        run_virtual(scene.manager.update_weights(7))


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


async def test_where_the_trainer_is_ahead_of_the_others_they_are_taken_along(scene: Scene) -> None:
    scene.a.seconds["stage"] = 5
    await scene.train_and_update(6)
    await scene.fleet.eject("b", OUT)
    scene.source.global_steps = 7
    catching_up = asyncio.create_task(scene.manager.catch_up(["b"]))
    await asyncio.sleep(4)
    assert versions(scene) == (6, 7) and scene.router.healthy == ["a"], "b waits for a"
    await catching_up
    assert versions(scene) == (7, 7) and scene.router.healthy == ["a", "b"]
    assert scene.source.orders == [(BOTH, None), (BOTH, None)]
    await scene.manager.catch_up(["b"])
    assert scene.source.orders[2:] == [(ONLY_B, None)], "a has it by now"


async def test_who_is_pinned_is_not_taken_along(scene: Scene) -> None:
    await scene.train_and_update(6)
    assert await scene.fleet.pin(1, "it evaluates") == ["b"]
    scene.source.global_steps = 7
    await scene.manager.catch_up(["a"])
    assert versions(scene) == (7, 6) and scene.router.healthy == ["a"]


async def test_catching_up_waits_for_an_update_under_way_and_the_next_update_for_it(scene: Scene) -> None:
    scene.b.seconds["stage"] = 5
    scene.source.global_steps = 7
    await asyncio.gather(
        scene.manager.update_weights(7),
        scene.manager.catch_up(["b"]),
        train(scene, 3),
        scene.manager.update_weights(7),
    )
    assert scene.of("trainer") == ["publish", "publish done", "send", "send done"] * 3
    assert (scene.of("a"), scene.of("b")) == (WHOLE * 2, WHOLE * 3)
    assert versions(scene) == (8, 8), "both went to the trainer's present weights"


async def test_who_fails_to_catch_up_twice_stays_out_and_who_is_gone_is_left_alone(scene: Scene) -> None:
    await scene.train_and_update(7)
    await scene.fleet.eject("b", OUT)
    scene.b.faults["stage"] = [OSError(), OSError()]
    report = await scene.manager.catch_up(["b"])
    assert (report.failures, report.replicas) == (2, ())
    assert scene.router.healthy == ["a"] and scene.fleet.targets == [scene.a, scene.b]
    await scene.fleet.lose("b", OSError("died"))
    assert (await scene.manager.catch_up(["b"])).replicas == ()
    assert len(scene.source.orders) == 3


@pytest.mark.parametrize(("sendings", "publications"), [([], [OUT]), ([OUT], [None, OUT])])
async def test_when_it_is_done_again_after_the_trainer_failed_nobody_is_left_behind(
    sendings: list[OSError], publications: list[OSError | None], scene: Scene
) -> None:
    """A train worker is lost before anything was sent, or in it, so that all are out of service."""
    await scene.train_and_update(6)
    await scene.fleet.eject("b", OUT)
    scene.source.global_steps = 7
    scene.source.faults = {"send": sendings, "publish": publications}
    with pytest.raises(WeightUpdateError, match="publish on trainer failed"):
        await scene.manager.catch_up(["b"])
    assert versions(scene) == (6, 6)
    await scene.manager.catch_up(["b"])
    assert versions(scene) == (7, 7) and scene.router.healthy == ["a", "b"]


async def test_a_trainer_that_went_back_is_refused_before_anything_is_published(scene: Scene) -> None:
    scene.source.global_steps = 15
    await scene.manager.update_weights(15)
    scene.source.global_steps, published = 2, len(scene.source.orders)
    for update in (scene.manager.update_weights(2), scene.manager.catch_up(["a"])):
        with pytest.raises(ValueError, match="the trainer is at version 2, replicas hold version 15, and versions"):
            await update
    assert len(scene.source.orders) == published and versions(scene) == (15, 15)
    assert scene.router.healthy == ["a", "b"], "a wrong call costs no replica"
