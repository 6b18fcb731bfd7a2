"""Lost train workers: what is trained again, what is done again, and when the run ends instead."""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from configs.checkpoint import CheckpointConfig
from configs.schema import Config, TrainerConfig
from rollout.errors import TooFewReplicasError
from tests.support.fakes import make_order, settle
from tests.support.recoveries import Group, Scene, within_deadline
from trainer.checkpoint.store import CheckpointError
from trainer.worker.recovery import (
    RecoveringUpdater,
    RecoveringWorkers,
    TrainWorkersLostError,
    TrainWorkerUnreachableError,
)
from weight_sync.protocol import WeightUpdateError

IN_MEMORY = Config(checkpoint=CheckpointConfig(memory_every=2))


@within_deadline
async def test_after_a_death_the_same_batches_are_trained_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Group(deaths=["train 4"]))
    assert await scene.train(0, 1) == [1, 2]
    assert scene.group.spares_after == [], "a run without a checkpoint may end before it needs any"
    await scene.save(2)
    assert await scene.train(2, 3) == [3, 4]
    scene.group.events.clear()
    scene.group.spares_after.clear()
    assert await scene.train(4) == [5]
    assert scene.group.events == ["train 4", "start", "load step_000002", "train 2", "train 3", "train 4"]
    assert scene.group.spares_after == [6], "not beside the steps that are trained again"
    assert scene.group.weights == ["b0", "b1", "b2", "b3", "b4"]
    assert scene.workers.gauges() == {"trainer/restarts": 1}
    assert await scene.train(5) == [6]
    lost, back = scene.reports
    assert lost == "train worker 1 died: the train workers start again (1 of at most 3)"
    assert back == (
        "the train workers are back at step 4, 0 s later (steps 0.0): from step_000002, with 2 step(s) trained again"
    )


@within_deadline
async def test_before_the_first_checkpoint_they_start_from_the_first_policy(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Group(deaths=["score b2"]))
    await scene.train(0, 1)
    assert await scene.score("b2") == {"values": ["b0", "b1"]}
    assert scene.group.events == ["train 0", "train 1", "score b2", "start", "train 0", "train 1", "score b2"]


@within_deadline
async def test_a_resumed_run_starts_again_from_what_it_resumed(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "before")
    await scene.train(0, 1)
    checkpoint = await scene.save(2)
    resumed = Scene(tmp_path / "after", Group(deaths=["train 3"]))
    await resumed.workers.resume(checkpoint)
    await resumed.train(2, 3)
    assert resumed.group.weights == ["b0", "b1", "b2", "b3"]
    assert resumed.group.events == [
        "load step_000002",
        "train 2",
        "train 3",
        "start",
        "load step_000002",
        "train 2",
        "train 3",
    ]


@within_deadline
async def test_a_broken_newest_checkpoint_is_reported_and_what_cannot_be_made_up_for_ends_the_run(
    tmp_path: Path,
) -> None:
    """The batches before the broken checkpoint are forgotten, so the one before it does not help this run."""
    scene = Scene(tmp_path, Group(deaths=["train 4"]))
    await scene.train(0)
    await scene.save(1)
    await scene.train(1, 2)
    path = (await scene.save(3)).path
    (path / "train" / "weights").unlink()
    await scene.train(3)
    with pytest.raises(TrainWorkersLostError, match="cannot go on from .*step_000001 to step 4: the batches betw"):
        await scene.train(4)
    assert "step_000003/train/weights cannot be read" in scene.reports[1]
    assert scene.group.events.count("load step_000001") == 0


@within_deadline
async def test_copies_in_memory_are_taken_instead_of_the_disk_and_only_steps_since_are_trained_again(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, Group(deaths=["train 5"]), IN_MEMORY)
    await scene.train(0)
    await scene.save(1)
    await scene.train(1, 2, 3, 4)
    scene.group.events.clear()
    await scene.train(5)
    assert scene.group.events == ["train 5", "start", "load copies", "train 4", "train 5", "copy"]
    assert scene.group.weights == ["b0", "b1", "b2", "b3", "b4", "b5"]
    assert scene.reports[-1].endswith("from memory, with 1 step(s) trained again")
    assert "checkpoint/memory_seconds" in scene.workers.gauges()


@within_deadline
async def test_copies_that_are_lost_with_their_machine_leave_the_checkpoint(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Group(deaths=["train 3"], errors={"load copies": KeyError("lost")}), IN_MEMORY)
    await scene.train(0)
    await scene.save(1)
    await scene.train(1, 2)
    scene.group.events.clear()
    await scene.train(3)
    again = ["start", "load step_000001", "train 1", "train 2"]
    assert scene.group.events == ["train 3", "start", "load copies", *again, "train 3", "copy"]
    assert scene.group.weights == ["b0", "b1", "b2", "b3"]
    assert "the copies of step 2 in memory cannot be loaded: KeyError('lost')" in scene.reports


@within_deadline
async def test_copies_that_only_some_ranks_have_loaded_leave_nothing_in_the_first_policy(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Group(deaths=["train 3"], errors={"load copies": KeyError("lost")}), IN_MEMORY)
    await scene.train(0, 1, 2, 3)
    assert scene.group.weights == ["b0", "b1", "b2", "b3"]
    assert scene.reports[-1].endswith("from the first policy, with 3 step(s) trained again")


@within_deadline
async def test_a_checkpoint_that_is_newer_than_the_copies_is_taken(tmp_path: Path) -> None:
    """The batches before it are no longer kept, so the copies lead nowhere."""
    scene = Scene(tmp_path, Group(deaths=["train 3"]), IN_MEMORY)
    await scene.train(0, 1, 2)
    await scene.save(3)
    scene.group.events.clear()
    await scene.train(3)
    assert scene.group.events == ["train 3", "start", "load step_000003", "train 3", "copy"]


@within_deadline
async def test_a_worker_that_dies_while_the_state_is_copied_is_started_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Group(deaths=["copy"]), IN_MEMORY)
    await scene.train(0, 1, 2)
    assert scene.group.events == ["train 0", "train 1", "copy", "start", "train 0", "train 1", "copy", "train 2"]
    scene.group.errors["copy"] = CheckpointError("no room")
    await scene.train(3)
    assert scene.reports[-1] == "no copies in memory of step 4: no room; training goes on"


@within_deadline
async def test_hanging_past_the_deadline_is_as_good_as_dead(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.train(0)
    scene.group.errors["train 1"] = TimeoutError("optimizer step 1 took longer than trainer.step_timeout_s=5")
    scene.group.errors_end_with_start = True
    await scene.train(1)
    assert scene.group.weights == ["b0", "b1"]
    assert scene.reports[0].startswith("optimizer step 1 took longer than trainer.step_timeout_s=5: the train w")


@within_deadline
async def test_an_error_of_living_workers_is_no_reason_to_start_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Group(errors={"train 1": FloatingPointError("gradient norm nan")}))
    await scene.train(0)
    with pytest.raises(FloatingPointError, match="gradient norm nan"):
        await scene.train(1)
    assert scene.group.events == ["train 0", "train 1"]
    assert scene.reports == []


@pytest.mark.parametrize("deaths", [["train 2", "start"], ["train 2", "train 1"]])
@within_deadline
async def test_a_death_while_they_start_again_is_the_next_restart(tmp_path: Path, deaths: list[str]) -> None:
    scene = Scene(tmp_path)
    await scene.train(0, 1)
    scene.group.deaths = deaths
    await scene.train(2)
    assert scene.group.weights == ["b0", "b1", "b2"]
    assert scene.workers.gauges() == {"trainer/restarts": 2}


@pytest.mark.parametrize("passes", [True, False])
@within_deadline
async def test_a_start_that_fails_while_all_live_is_the_next_restart_and_no_first_policy_is_trained_on(
    tmp_path: Path, passes: bool
) -> None:
    """A disk that fails for a moment: the ranks hold the first policy then, and answer."""
    stale = OSError(116, "Stale file handle")
    scene = Scene(tmp_path, Group(deaths=["stage"], errors={"load step_000002": stale}))
    await scene.train(0, 1)
    scene.group.deaths = []
    await scene.save(2)
    scene.group.deaths, scene.group.errors_pass = ["stage"], passes
    await scene.train(2, 3)
    staging = scene.workers.stage_checkpoint(tmp_path / "aside")
    if passes:
        await staging
        assert scene.reports[1].startswith("the train workers could not start again (OSError: [Errno 116] Stale fi")
        await scene.train(4)
        assert scene.group.weights == ["b0", "b1", "b2", "b3", "b4"]
        return
    with pytest.raises(TrainWorkersLostError, match="could not start again .*Stale file handle.*are used up"):
        await staging
    with pytest.raises(TrainWorkersLostError, match="have not come back"):  # whoever has heard of it
        await scene.train(4)


@within_deadline
async def test_a_save_that_commits_while_they_train_again_takes_no_batch_from_them(tmp_path: Path) -> None:
    """It was waiting for the lock that the restart holds while it looks for a checkpoint."""
    gate = asyncio.Event()
    scene = Scene(tmp_path, Group(deaths=["train 4"], gate=gate))

    async def commit() -> None:
        async with scene.store.busy:
            scene.workers.forget_before(4)
            scene.group.events.append("commit 4")

    await scene.train(0, 1, 2, 3)
    training = asyncio.create_task(scene.train(4))
    await settle()
    committing = asyncio.create_task(commit())
    await settle()
    scene.group.events.clear()
    gate.set()
    await training
    assert scene.group.events.index("commit 4") < scene.group.events.index("train 1")
    assert scene.group.weights == ["b0", "b1", "b2", "b3", "b4"]
    await committing


@pytest.mark.parametrize(
    ("config", "restarts", "reason"),
    [
        (Config(trainer=TrainerConfig(max_restarts=2)), 2, "all restarts of trainer.max_restarts=2 are used up"),
        (
            Config(checkpoint=CheckpointConfig(every=0)),
            0,
            "without checkpoints (checkpoint.every=0) the train workers cannot start again",
        ),
    ],
)
@within_deadline
async def test_workers_that_may_not_start_again_end_the_run(
    tmp_path: Path, config: Config, restarts: int, reason: str
) -> None:
    scene = Scene(tmp_path, Group(deaths=["train 1"] * 5), config)
    await scene.train(0)
    with pytest.raises(TrainWorkersLostError) as caught:
        await scene.train(1)
    assert str(caught.value) == f"train worker 1 died; {reason}"
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert scene.group.events.count("start") == restarts


class Manager:
    """Publishes and sends, and wraps what goes wrong. Publishing has a deadline."""

    def __init__(self, workers: RecoveringWorkers):
        self._workers = workers
        self.publishing, self.updating = asyncio.Lock(), asyncio.Lock()
        self.updates: list[Any] = []

    async def update_weights(self, global_steps: int, published: asyncio.Event | None = None) -> Any:
        try:
            async with self.publishing:
                async with asyncio.timeout(0.05):
                    manifest = await self._workers.publish(make_order(global_steps))
                await self._workers.send(manifest)
        except Exception as error:
            raise WeightUpdateError(f"publish on trainer failed: {error}") from error
        self.updates.append(manifest)

    async def catch_up(self, names: Collection[str], begins: Callable[[], None] = lambda: None) -> Any:
        await self.update_weights(self._workers.global_steps)


@pytest.mark.parametrize("dies_in", ["publish 2", "send"])
@pytest.mark.parametrize("is_catching_up", [False, True])
@within_deadline
async def test_an_update_in_which_a_worker_dies_is_done_again_with_the_same_weights(
    tmp_path: Path, dies_in: str, is_catching_up: bool
) -> None:
    scene = Scene(tmp_path)
    manager = Manager(scene.workers)
    updater = RecoveringUpdater(manager, scene.workers)
    await scene.train(0)
    await updater.update_weights(1)
    await scene.train(1)
    scene.group.deaths = [dies_in]
    await (updater.catch_up(["replica-1"]) if is_catching_up else updater.update_weights(2))
    assert manager.updates == [
        {"global_steps": 1, "weights": ["b0"]},
        {"global_steps": 2, "weights": ["b0", "b1"]},
    ]
    assert scene.workers.gauges() == {"trainer/restarts": 1}
    scene.group.errors["publish 3"] = OSError("no room in /dev/shm")
    with pytest.raises(RuntimeError, match="publish on trainer failed: no room in /dev/shm"):
        await updater.update_weights(3)


@pytest.mark.parametrize("during", ["train 1", "publish 2", "send"])
@within_deadline
async def test_workers_of_which_one_was_out_of_reach_during_a_call_start_again(tmp_path: Path, during: str) -> None:
    scene = Scene(tmp_path)
    manager = Manager(scene.workers)
    await scene.train(0)
    scene.group.errors[during] = TrainWorkerUnreachableError("train worker 1 was out of reach during a call")
    scene.group.errors_end_with_start = True
    await scene.train(1)
    await RecoveringUpdater(manager, scene.workers).update_weights(2)
    assert manager.updates == [{"global_steps": 2, "weights": ["b0", "b1"]}]
    assert scene.reports[0].startswith("train worker 1 was out of reach during a call: the train workers start again")
    assert scene.workers.gauges() == {"trainer/restarts": 1}


@within_deadline
async def test_an_update_that_fails_for_the_replicas_is_not_done_again_because_a_worker_was_lost_too(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    manager = Manager(scene.workers)

    async def update_weights(global_steps: int, published: Any = None) -> Any:
        scene.group.lost = "train worker 0 died"
        await scene.score("b1")  # starts the workers again
        raise TooFewReplicasError("0 replicas are left")

    await scene.train(0)
    manager.update_weights = update_weights
    with pytest.raises(TooFewReplicasError):
        await RecoveringUpdater(manager, scene.workers).update_weights(1)
    assert scene.workers.gauges() == {"trainer/restarts": 1}


@within_deadline
async def test_a_restart_that_outlasts_the_deadline_of_publishing_is_waited_for(tmp_path: Path) -> None:
    """It begins, for a batch that is scored, between the update's beginning and its publishing."""
    gate = asyncio.Event()
    scene = Scene(tmp_path, Group(gate=gate))
    manager = Manager(scene.workers)
    await scene.train(0)
    async with manager.publishing:
        catching_up = asyncio.create_task(RecoveringUpdater(manager, scene.workers).catch_up(["replica-1"]))
        await settle()
        scene.group.lost = "train worker 0 died"
        scoring = asyncio.create_task(scene.score("b1"))
        await settle()
    await asyncio.sleep(0.1)
    assert not catching_up.done()
    gate.set()
    await asyncio.gather(catching_up, scoring)
    assert manager.updates == [{"global_steps": 1, "weights": ["b0"]}]
    assert scene.workers.gauges() == {"trainer/restarts": 1}


@within_deadline
async def test_nothing_is_published_from_half_started_workers_and_two_callers_start_them_once(tmp_path: Path) -> None:
    gate = asyncio.Event()
    scene = Scene(tmp_path, Group(gate=gate))
    await scene.train(0, 1)
    scene.group.lost = "train worker 0 died"
    calls = [asyncio.create_task(scene.score("b2")) for _ in range(2)]
    await settle()
    publishing = asyncio.create_task(scene.workers.publish(make_order(2)))
    await settle()
    assert not publishing.done()
    gate.set()
    assert (await publishing)["weights"] == ["b0", "b1"]
    assert await asyncio.gather(*calls) == [{"values": ["b0", "b1"]}] * 2
    assert scene.group.events.count("start") == 1
    assert scene.workers.gauges() == {"trainer/restarts": 1}
