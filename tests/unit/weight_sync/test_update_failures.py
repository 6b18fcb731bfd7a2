"""Failures in an update: who is taken out of service for it, tried once more, brought back or given up."""

import asyncio
from typing import Any

import pytest

from rollout.errors import TooFewReplicasError
from rollout.replica.lifecycle import Watch
from tests.support.fakes import now
from tests.support.updates import HANGS, WHOLE, Scene
from weight_sync.protocol import WeightUpdateError

DEADLINE_OF = {
    "publish": "weight_sync.stage_timeout_s=100.0",
    "send": "weight_sync.stage_timeout_s=100.0",
    "stage": "weight_sync.stage_timeout_s=100.0",
    "commit": "weight_sync.pause_timeout_s=10.0 and weight_sync.swap_timeout_s=50.0",
    "status": "weight_sync.pause_timeout_s=10.0",
}
REASONS: list[tuple[Any, str]] = [
    (ValueError("no such tensor"), "failed: ValueError: no such tensor"),
    (TimeoutError("no route"), "failed: TimeoutError: no route"),
    (HANGS, "took longer than "),
]
BROKEN = OSError("broken")


def reason_of(phase: str, fault: Any) -> str:
    name = "trainer" if phase in ("publish", "send") else "b"
    return f"{phase} on {name} {dict(REASONS)[fault]}{DEADLINE_OF[phase] if fault is HANGS else ''}"


@pytest.fixture
def scene() -> Scene:
    return Scene()


# -- one replica -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [fault for fault, _ in REASONS], ids=["raises", "times out inside", "hangs"])
@pytest.mark.parametrize("phase", ["stage", "commit"])
def test_a_replica_that_fails_once_is_tried_again_alone_and_costs_a_count(phase: str, fault: Any, scene: Scene) -> None:
    scene.b.faults[phase] = [fault]
    [report] = scene.update(1)
    assert (report.failures, {update.name for update in report.replicas}) == (1, {"a", "b"})
    assert report.gauges()["weight_sync/failures"] == 1
    assert scene.of_fleet() == [f"b is out of service: {reason_of(phase, fault)}", "b is back in service"]
    assert scene.router.healthy == ["a", "b"] and scene.b.state.global_steps == 1
    assert scene.of("a") == WHOLE
    ended = [f"{phase} cancelled"] if fault is HANGS else []
    assert scene.of("b") == WHOLE[: WHOLE.index(phase) + 1] + ended + WHOLE
    assert scene.source.orders == [({"a": 1, "b": 1}, None), ({"b": 1}, None)]


@pytest.mark.parametrize("phase", ["stage", "commit"])
async def test_a_whole_replica_that_fails_twice_stays_out_and_comes_back_with_the_next_update(
    phase: str, scene: Scene
) -> None:
    scene.b.faults[phase] = [BROKEN, BROKEN]
    report = await scene.train_and_update(1)
    assert ([update.name for update in report.replicas], report.failures) == (["a"], 2)
    assert scene.router.healthy == ["a"] and scene.fleet.targets == [scene.a, scene.b]
    assert scene.of_fleet() == [f"b is out of service: {phase} on b failed: OSError: broken"]
    report = await scene.train_and_update(2)
    assert ({update.name for update in report.replicas}, report.failures) == ({"a", "b"}, 0)
    assert scene.of_fleet()[1:] == ["b is back in service"] and scene.router.healthy == ["a", "b"]


@pytest.mark.parametrize("misses", [(1, 2), (1, 3)], ids=["in a row", "with one between"])
async def test_a_whole_replica_that_misses_two_updates_in_a_row_is_given_up(
    misses: tuple[int, int], scene: Scene
) -> None:
    for version in (1, 2, 3):
        scene.b.faults["stage"] = [BROKEN, BROKEN] if version in misses else []
        await scene.train_and_update(version)
    given_up = "b is given up: stage on b failed: OSError: broken"
    assert (given_up in scene.of_fleet()) == (misses == (1, 2))
    assert scene.fleet.targets == ([scene.a] if misses == (1, 2) else [scene.a, scene.b])


def test_a_torn_replica_is_given_up(scene: Scene) -> None:
    scene.b.tears, scene.b.faults["commit"] = True, [BROKEN, BROKEN]
    [report] = scene.update(1)
    assert [update.name for update in report.replicas] == ["a"]
    error = "commit on b failed: OSError: broken"
    assert scene.of_fleet() == [f"b is out of service: {error}", f"b is given up: {error}"]
    assert scene.events[-1] == "b.kill" and scene.fleet.targets == [scene.a] and scene.router.healthy == ["a"]


@pytest.mark.parametrize("fault", [BROKEN, HANGS], ids=["raises", "hangs"])
async def test_a_replica_that_does_not_even_tell_its_state_is_given_up(fault: Any, scene: Scene) -> None:
    scene.b.faults = {"stage": [BROKEN, BROKEN], "status": [fault]}
    await scene.train_and_update(1)
    assert scene.fleet.targets == [scene.a]
    error = scene.fleet.replicas["b"].reason
    reason = "failed: OSError: broken" if fault is BROKEN else f"took longer than {DEADLINE_OF['status']}"
    assert error is not None and str(error) == "stage on b failed: OSError: broken"
    assert error.__notes__ == [f"then: status on b {reason}"]


def test_a_replica_that_stays_out_after_a_loss_of_the_others_ends_the_run(scene: Scene) -> None:
    """The message tells replica, phase and reason, and the key that says how many are enough."""
    scene.a.faults["stage"] = [HANGS, HANGS]
    scene.b.tears, scene.b.faults["commit"] = True, [HANGS, HANGS]
    with pytest.raises(TooFewReplicasError) as raised:
        scene.update(1)
    assert str(raised.value) == (
        "0 replicas are left in service, rollout.min_replicas=1: "
        "stage on a took longer than weight_sync.stage_timeout_s=100.0"
    )
    assert isinstance(raised.value.__cause__, WeightUpdateError)
    assert scene.fleet.targets == [scene.a]


@pytest.mark.parametrize(("pause_mode", "is_given_up"), [(None, True), ("keep", False)])
def test_a_replica_that_does_not_go_on_is_given_up_unless_a_client_paused_it(
    pause_mode: str | None, is_given_up: bool, scene: Scene
) -> None:
    scene.b.frozen, scene.b.pause_mode, scene.b.faults["commit"] = True, pause_mode, [BROKEN, BROKEN]
    scene.update(1)
    assert ("b.kill" in scene.events) is is_given_up and scene.router.healthy == ["a"]


async def test_a_replica_that_died_meanwhile_is_not_tried_again_and_not_brought_back(scene: Scene) -> None:
    scene.b.seconds["stage"], scene.b.faults["stage"] = 5, [BROKEN]
    updating = asyncio.create_task(scene.train_and_update(1))
    await asyncio.sleep(2)
    await scene.fleet.lose("b", RuntimeError("b died"))
    assert [update.name for update in (await updating).replicas] == ["a"]
    assert scene.of("b") == ["stage", "kill"] and scene.router.healthy == ["a"]
    assert scene.source.orders == [({"a": 1, "b": 1}, None)], "nothing is published for nobody"


async def test_a_replica_that_died_after_its_commit_is_not_said_to_be_back(scene: Scene) -> None:
    scene.a.seconds["commit"] = 5
    updating = asyncio.create_task(scene.train_and_update(1))
    await asyncio.sleep(2)
    await scene.fleet.lose("b", RuntimeError("b died"))
    await updating
    assert scene.of_fleet() == ["b is given up: b died"] and scene.router.healthy == ["a"]


@pytest.mark.parametrize("is_well_again", [True, False])
async def test_a_replica_that_is_tried_again_counts_when_another_one_dies_meanwhile(
    is_well_again: bool, scene: Scene
) -> None:
    scene.source.faults["send"] = [BROKEN]  # takes both out of service
    scene.a.seconds["stage"], scene.a.faults["stage"] = 5, [None, None if is_well_again else BROKEN]
    updating = asyncio.create_task(scene.train_and_update(1))
    await asyncio.sleep(7)
    assert scene.router.healthy == []
    await scene.fleet.lose("b", RuntimeError("b died"))
    if not is_well_again:
        with pytest.raises(TooFewReplicasError):
            await updating
    else:
        await updating
        assert scene.router.healthy == ["a"]
    with pytest.raises(TooFewReplicasError):
        await scene.fleet.lose("a", RuntimeError("a died"))


# -- the trainer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [fault for fault, _ in REASONS], ids=["raises", "times out inside", "hangs"])
async def test_without_published_weights_no_replica_is_touched(fault: Any, scene: Scene) -> None:
    scene.source.faults["publish"] = [fault]
    with pytest.raises(WeightUpdateError) as raised:
        await scene.train_and_update(1)
    assert str(raised.value) == reason_of("publish", fault)
    assert all(event.startswith("trainer.publish") for event in scene.events)
    assert (await scene.train_and_update(2)).failures == 0


@pytest.mark.parametrize("fault", [fault for fault, _ in REASONS], ids=["raises", "times out inside", "hangs"])
def test_weights_that_were_not_sent_are_not_committed_and_are_sent_again_to_all(fault: Any, scene: Scene) -> None:
    scene.source.faults["send"] = [fault]
    [report] = scene.update(1)
    assert report.failures == 2 and scene.router.healthy == ["a", "b"]
    out = [f"{name} is out of service: {reason_of('send', fault)}" for name in "ab"]
    assert scene.of_fleet() == [*out, "a is back in service", "b is back in service"]
    assert scene.of("a") == scene.of("b") == ["stage", "stage done", *WHOLE]


def test_a_replica_that_holds_other_bytes_than_were_sent_does_not_serve_them(scene: Scene) -> None:
    scene.source.checksum = 5
    with pytest.raises(TooFewReplicasError, match="commit on a failed: ValueError: published was 5"):
        scene.update(1)
    assert scene.router.healthy == []


async def test_a_trainer_that_cannot_publish_again_for_the_replica_that_failed_ends_the_update(scene: Scene) -> None:
    scene.b.faults["stage"], scene.source.faults["publish"] = [BROKEN], [None, BROKEN]
    with pytest.raises(WeightUpdateError, match="publish on trainer failed: OSError: broken"):
        await scene.train_and_update(1)
    assert scene.router.healthy == ["a"] and scene.a.state.global_steps == 1
    assert (await scene.train_and_update(2)).failures == 0
    assert scene.router.healthy == ["a", "b"]


# -- a replica that fails while the others wait for it -----------------------------------------------------------------


@pytest.mark.parametrize(("num_faults", "served"), [(1, "acb"), (2, "ac")])
async def test_one_that_does_not_come_keeps_the_others_waiting_neither_now_nor_in_the_second_try(
    num_faults: int, served: str
) -> None:
    scene = Scene(names="abc", meeting=True)
    scene.b.faults = {"stage": [BROKEN] * num_faults, "status": [BROKEN]}
    report = await scene.train_and_update(1)
    assert now() < 1, "nobody waited for a deadline"
    assert [update.name for update in report.replicas] == list(served)
    assert scene.router.healthy == sorted(served)
    tried = [{"a": 1, "b": 1, "c": 1}, {"a": 1, "c": 1}, {"b": 1}]
    assert [receivers for receivers, _ in scene.source.orders] == tried
    assert "b is out of service: stage on b failed: OSError: broken" in scene.events


def test_a_replica_that_has_staged_when_the_sending_is_stopped_reports_why(scene: Scene) -> None:
    scene.source.seconds["send"], scene.b.seconds["stage"], scene.b.faults["stage"] = 50, 5, [BROKEN]
    [report] = scene.update(1)
    assert report.failures == 2 and scene.router.healthy == ["a", "b"]
    assert "a is out of service: send on trainer was stopped: b failed" in scene.events
    assert [event for event in scene.of("trainer") if "send " in event] == ["send cancelled"] + 2 * ["send done"]


# -- a replica that answers nothing ------------------------------------------------------------------------------------


def fall_silent(scene: Scene, *names: str) -> None:
    """Let the monitor have noticed that these replicas do not answer, and that all others do."""
    for name, replica in scene.fleet.replicas.items():
        replica.watch = Watch(observed=0.0, silence="no answer for 20 s" if name in names else None)


@pytest.mark.parametrize("phase", ["stage", "commit"])
async def test_an_update_goes_on_without_a_replica_that_falls_silent_and_the_next_one_does_not_wait_for_it(
    phase: str,
) -> None:
    scene = Scene(names="abc", meeting=True)
    scene.b.faults[phase] = [HANGS]
    updating = asyncio.create_task(scene.train_and_update(1))
    await asyncio.sleep(7)
    assert not updating.done()
    fall_silent(scene, "b")
    assert [update.name for update in (await updating).replicas] == ["a", "c"] and now() < 9
    assert scene.of("b")[-1] == f"{phase} cancelled" and scene.router.healthy == ["a", "c"]
    out = f"b is out of service: {phase} on b failed: SilentReplicaError: no answer for 20 s"
    assert [event for event in scene.of_fleet() if event.startswith("b ")] == [out]
    assert [update.name for update in (await scene.train_and_update(2)).replicas] == ["a", "c"] and now() < 9
    fall_silent(scene)
    report = await scene.train_and_update(3)
    assert len(report.replicas) == 3 and scene.router.healthy == ["a", "b", "c"]
    assert scene.fleet.replicas["b"].misses == 0


async def test_a_replica_that_was_silent_before_the_update_leaves_service_for_it() -> None:
    scene = Scene(min_replicas=2)
    fall_silent(scene, "b")
    report = await scene.train_and_update(1)
    assert ([update.name for update in report.replicas], report.failures) == (["a"], 0)
    assert scene.of_fleet() == ["b is out of service: no update of b: no answer for 20 s"]
    scene.fleet.require_enough(BROKEN)
    fall_silent(scene)
    with pytest.raises(TooFewReplicasError):  # it answers again, and would be back if it were well
        scene.fleet.require_enough(BROKEN)


async def test_where_no_replica_answers_the_update_waits_for_all(scene: Scene) -> None:
    scene.a.seconds["stage"] = scene.b.seconds["stage"] = 30
    fall_silent(scene, "a", "b")
    assert len((await scene.train_and_update(1)).replicas) == 2 and now() == 30


# -- the driver --------------------------------------------------------------------------------------------------------


async def test_a_cancelled_update_leaves_nothing_under_way(scene: Scene) -> None:
    scene.a.seconds["commit"] = scene.b.seconds["stage"] = scene.source.seconds["send"] = 50
    task = asyncio.create_task(scene.train_and_update(1))
    await asyncio.sleep(20)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert scene.of("trainer")[-1] == "send cancelled" and scene.of("b")[-1] == "stage cancelled"
    for each in (scene.a, scene.b, scene.source):
        each.seconds.clear()
    await scene.train_and_update(2)
    assert scene.source.orders[-1] == ({"a": 1, "b": 1}, None), "nobody knows what they hold"
