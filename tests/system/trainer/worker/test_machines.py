"""Train workers on two machines that share no run folder, of which one dies: checkpoints are whole or refused."""

import asyncio
import os
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group

from configs.checkpoint import CheckpointConfig
from configs.schema import Config, Layout, TrainerConfig
from rollout.actors.place import own_place
from tests.support import batches
from tests.support.machines import NEEDS_NAMESPACES, Machine
from tests.support.reference import VOCAB_SIZE, double, random_groups
from tests.support.train_workers import make_train_workers
from trainer.batch import StepBatch
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.store import METADATA, CheckpointStore
from trainer.tiny.model import build_model, build_tokenizer, save_tiny_model
from trainer.worker.recovery import RecoveringWorkers
from trainer.worker.worker_group import TrainWorkerGroup

pytestmark = [pytest.mark.slow, NEEDS_NAMESPACES]

CONFIG = Config(
    trainer=TrainerConfig(num_ranks=2, total_steps=6, lr=3e-3, step_timeout_s=120),
    checkpoint=CheckpointConfig(every=2, memory_every=1),
)


@dataclass
class Scene:
    runner: asyncio.Runner
    machine: Machine
    group: TrainWorkerGroup
    workers: RecoveringWorkers
    store: CheckpointStore
    checkpointer: Checkpointer
    steps: list[StepBatch]
    reports: list[str]
    digests: list[str] = field(default_factory=list)

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            step = self.workers.global_steps
            self.digests.append((await self.workers.train_step(self.steps[step], step)).weights)

    def run(self, call: Awaitable[Any]) -> Any:
        return self.runner.run(asyncio.wait_for(call, 300))

    async def save(self, step: int) -> None:
        await self.checkpointer.stage(step)
        self.checkpointer.commit({})
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "checkpoint"))

    async def rank_elsewhere(self) -> Any:
        """Return the actor of the rank on the other machine, where its spare process is, too."""
        asked = [actor.__ray_call__.remote(lambda actor: own_place().node_id) for actor in self.group.actors]
        nodes = await asyncio.gather(*asked)
        return self.group.actors[nodes.index(self.machine.node_id)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    folder = tmp_path_factory.mktemp("machines")
    runs, model = folder / "runs", folder / "model"
    runs.mkdir()
    save_tiny_model(model, build_tokenizer(["0123456789"]), seed=0)
    machine = Machine(lacks=runs, num_cpus=1)
    store, reports = CheckpointStore(runs / "checkpoints"), list[str]()
    placement = placement_group([{"CPU": 1}, {"CPU": 1}], "SPREAD")
    group, workers, checkpointer = make_train_workers(CONFIG, store, "machines", reports.append, placement)
    sampler = double(build_model(VOCAB_SIZE, seed=0))
    steps = [batches.pack(random_groups(sampler, seed), Layout.packed, 2, 48) for seed in range(6)]
    with asyncio.Runner() as runner:
        scene = Scene(runner, machine, group, workers, store, checkpointer, steps, reports)
        try:
            scene.run(workers.setup(str(model)))
            yield scene
        finally:
            group.kill()
            machine.die()
            ray.shutdown()


def test_ranks_that_do_not_have_the_run_folder_save_and_load_through_the_driver(scene: Scene) -> None:
    async def scenario() -> None:
        await scene.train(2)
        await scene.save(2)
        checkpoint = scene.store.newest_good(scene.reports.append)
        assert checkpoint is not None and checkpoint.global_steps == 2
        names = {path.name for path in checkpoint.train_folder.iterdir()}
        assert names == {METADATA, "__0_0.distcp", "__1_0.distcp"}
        await scene.train(1)
        await scene.group.load_checkpoint(checkpoint.train_folder)
        origin = await scene.group.origin()
        assert origin.weights == scene.digests[1], "those of the checkpoint again"
        again = await scene.group.train_step(scene.steps[2], 2)
        assert again.weights == scene.digests[2]

    assert len({scene.machine.node_id, ray.get_runtime_context().get_node_id()}) == 2
    assert scene.run(scene.rank_elsewhere())
    scene.run(scenario())
    assert scene.reports == []


def test_a_process_that_writes_for_other_machines_may_die(scene: Scene) -> None:
    """One save may fail of it; no later one does."""

    async def scenario() -> None:
        drivers_pid = scene.group._drivers_machine.__ray_call__.remote(lambda machine: os.getpid())
        psutil.Process(await drivers_pid).kill()
        await scene.save(3)
        if scene.reports:
            await scene.save(3)
        checkpoint = scene.store.newest_good(pytest.fail)
        assert checkpoint is not None and checkpoint.global_steps == 3

    scene.run(scenario())
    assert all("the checkpoint of step 3 failed: " in report for report in scene.reports) and len(scene.reports) < 2
    scene.reports.clear()


def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(scene: Scene) -> None:
    """It writes through a process on the driver's machine, which stands still meanwhile."""

    async def scenario() -> None:
        await scene.train(1)
        rank = await scene.rank_elsewhere()
        disk = psutil.Process(await scene.group._drivers_machine.__ray_call__.remote(lambda machine: os.getpid()))
        disk.suspend()
        await scene.checkpointer.stage(4)
        scene.checkpointer.commit({})
        ray.kill(rank)  # which waits for the driver's machine, and the other rank for it
        disk.resume()
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "checkpoint"))

    scene.run(scenario())
    assert "the checkpoint of step 4 failed: the train workers could not write: " in scene.reports[0]
    assert {path.name for path in scene.store.folder.iterdir()} == {"step_000002", "step_000003"}
    scene.run(scene.train(1))
    assert scene.reports[-1].endswith(": from memory, with 0 step(s) trained again")


def test_a_machine_that_dies_takes_no_step_with_it(scene: Scene) -> None:
    """The state of its rank is in the memory of the other machine, too."""
    scene.machine.die()
    scene.run(scene.train(1))
    assert scene.reports[-1].endswith(": from memory, with 0 step(s) trained again")


def test_the_weights_are_those_of_a_run_that_lost_nothing(scene: Scene) -> None:
    async def undisturbed() -> list[str]:
        await scene.group.start_again()
        return [(await scene.group.train_step(batch, step)).weights for step, batch in enumerate(scene.steps)]

    assert scene.run(undisturbed()) == scene.digests
