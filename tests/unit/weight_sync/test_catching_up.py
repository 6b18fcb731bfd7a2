"""Replicas that catch up with the trainer, and whom they take along so that no version ever descends."""

import asyncio

import pytest

from tests.support.fakes import run_virtual, settle
from tests.unit.weight_sync.test_checkpoint_manager import WHOLE, Scene
from weight_sync.checkpoint_manager import WeightUpdateError

BOTH, ONLY_B = {"a": 1, "b": 1}, {"b": 1}
OUT = OSError("out")


@pytest.fixture
def scene() -> Scene:
    return Scene()


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


def test_who_cannot_be_taken_along_goes_out_of_service(scene: Scene) -> None:
    async def main() -> None:
        await scene.manager.update_weights(6)
        await scene.fleet.eject("b", OUT)
        scene.a.faults["stage"] = [OSError(), OSError()]
        report = await scene.manager.catch_up(["b"])
        assert report is not None and report.failures == 2
        assert scene.router.healthy == ["b"] and scene.fleet.targets == [scene.a, scene.b]
        await scene.manager.update_weights(8)
        assert scene.router.healthy == ["a", "b"]

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
