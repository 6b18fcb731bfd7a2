"""Real train workers of two ranks that are killed: what they hold afterwards, what is on disk, and its export."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray.exceptions import RayActorError
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from configs.checkpoint import CheckpointConfig
from configs.schema import Config, Layout, TrainerConfig
from tests.support import batches
from tests.support.fakes import make_order
from tests.support.paths import ROOT
from tests.support.reference import double, random_groups
from tests.support.train_workers import make_train_workers
from trainer.batch import StepBatch
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.store import CheckpointError, CheckpointStore
from trainer.metrics import to_floats
from trainer.worker.recovery import RecoveringWorkers
from trainer.worker.worker_group import TrainWorkerGroup
from weight_sync.transports.cleanup import release_all

pytestmark = pytest.mark.slow

OWNER = "worker-death"
NUM_STEPS, KILLED_IN = 6, 3
CONFIG = Config(
    trainer=TrainerConfig(num_ranks=2, total_steps=NUM_STEPS, lr=3e-3, step_timeout_s=60),
    checkpoint=CheckpointConfig(every=2),
)
KEYS = ("actor/pg_loss", "actor/grad_norm", "actor/lr")


@dataclass
class Scene:
    runner: asyncio.Runner
    group: TrainWorkerGroup
    workers: RecoveringWorkers
    checkpointer: Checkpointer
    store: CheckpointStore
    steps: list[StepBatch]
    reports: list[str]
    metrics: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    weights: dict[str, list[dict[str, torch.Tensor]]] = field(default_factory=dict)

    def run(self, call: Awaitable[Any]) -> Any:
        return self.runner.run(asyncio.wait_for(call, 200))

    async def rows(self) -> list[dict[str, torch.Tensor]]:
        return await asyncio.gather(*(actor.__ray_call__.remote(local_rows) for actor in self.group.actors))

    async def pid(self, rank: int) -> int:
        return await self.group.actors[rank].__ray_call__.remote(lambda actor: os.getpid())


def local_rows(actor: Any) -> dict[str, torch.Tensor]:
    """Runs in a train worker."""
    return {name: rows.clone() for name, rows in actor._worker._shards(frozen=True)}


@pytest.fixture(scope="module")
def scene(ray_cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    store, reports = CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints"), list[str]()
    group, workers, checkpointer = make_train_workers(CONFIG, store, OWNER, reports.append)
    model = double(Qwen3ForCausalLM.from_pretrained(tiny_model))
    steps = [batches.pack(random_groups(model, seed), Layout.packed, 2, 48) for seed in range(NUM_STEPS)]
    with asyncio.Runner() as runner:
        scene = Scene(runner, group, workers, checkpointer, store, steps, reports)
        try:
            scene.run(workers.setup(str(tiny_model)))
            yield scene
        finally:
            group.kill()
            release_all(CONFIG.weight_sync, OWNER)


@pytest.fixture(scope="module")
def killed(scene: Scene) -> Scene:
    """Trained with a rank killed in step KILLED_IN, and, as `twin`, once more from the start without."""

    async def train() -> list[dict[str, float]]:
        metrics = []
        async with scene.checkpointer:
            for step, batch in enumerate(scene.steps):
                call = asyncio.create_task(scene.workers.train_step(batch, step))
                if step == KILLED_IN:
                    await asyncio.sleep(0)
                    os.kill(victim, signal.SIGKILL)
                metrics.append(to_floats((await call).metrics))
                if scene.checkpointer.is_due(step + 1):
                    await scene.checkpointer.stage(step + 1)
                    scene.checkpointer.commit({"recorder": b"{}"})
                    await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "checkpoint"])
        return metrics

    async def train_undisturbed() -> list[dict[str, float]]:
        await scene.group.start_again()
        return [
            to_floats((await scene.group.train_step(batch, step)).metrics) for step, batch in enumerate(scene.steps)
        ]

    victim = scene.run(scene.pid(1))
    scene.metrics["killed"] = scene.run(train())
    scene.weights["killed"] = scene.run(scene.rows())
    scene.metrics["twin"] = scene.run(train_undisturbed())
    scene.weights["twin"] = scene.run(scene.rows())
    return scene


def assert_weights_are_the_twins(scene: Scene, found: list[dict[str, torch.Tensor]]) -> None:
    for ours, theirs in zip(found, scene.weights["twin"], strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_rank_killed_in_a_step_changes_no_weight_and_no_metric(killed: Scene) -> None:
    assert_weights_are_the_twins(killed, killed.weights["killed"])
    ours, theirs = ([[step[key] for key in KEYS] for step in killed.metrics[run]] for run in ("killed", "twin"))
    assert ours == theirs
    lost, back = killed.reports
    assert lost == "train worker 1 died: the train workers start again (1 of at most 3)"
    assert back.startswith(f"the train workers are back at step {KILLED_IN}, ")
    assert back.endswith(": from step_000002, with 1 step(s) trained again")


def test_what_is_on_disk_is_good_and_the_oldest_is_gone(killed: Scene) -> None:
    found = killed.store.newest_good(killed.reports.append)
    assert found is not None and found.global_steps == NUM_STEPS
    assert sorted(path.name for path in killed.store.folder.iterdir()) == ["step_000004", "step_000006"]
    assert {path.name for path in found.path.iterdir()} == {"train", "model", "recorder.bin", "COMPLETE.json"}


def lose_gpu(worker: Any) -> None:
    """Fail as CUDA does after an illegal access: everything later in this process fails too."""
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_a_rank_that_loses_its_gpu_before_an_update_costs_the_update_nothing(killed: Scene) -> None:
    """Rank 0, which serves the process group's store. The newest checkpoint is of this very step."""

    async def scenario() -> Any:
        with pytest.raises(RayActorError):
            await killed.group.actors[0].call.remote(lose_gpu)
        return await killed.workers.again_if_lost(lambda: killed.workers.publish(make_order(NUM_STEPS)))

    manifest = killed.run(scenario())
    assert manifest.global_steps == NUM_STEPS
    assert_weights_are_the_twins(killed, killed.run(killed.rows()))
    assert killed.reports[-1].endswith(": from step_000006, with 0 step(s) trained again")


def seem_to_write(worker: Any) -> None:
    worker._writer._writing = Future()


def seem_to_have_written(worker: Any) -> None:
    worker._writer._writing = None


def test_a_checkpoint_that_one_rank_refuses_keeps_no_other_rank(killed: Scene, tmp_path: Path) -> None:
    """Its disk is slower than the deadline of the checkpoint before."""

    async def scenario() -> None:
        await killed.group.actors[1].call.remote(seem_to_write)
        with pytest.raises(CheckpointError, match="the checkpoint before is still being written"):
            await killed.workers.stage_checkpoint(tmp_path)
        await killed.group.origin()
        await killed.group.actors[1].call.remote(seem_to_have_written)

    killed.run(asyncio.wait_for(scenario(), 60))


def test_a_rank_that_stands_still_is_started_again_at_the_deadline(
    killed: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate of step -1 is 0: the step changes nothing."""
    stopped: list[psutil.Process] = []

    async def scenario() -> Any:
        stopped.append(psutil.Process(await killed.pid(1)))
        stopped[0].suspend()
        with monkeypatch.context() as patch:
            patch.setattr(killed.group, "_trainer", replace(CONFIG.trainer, step_timeout_s=15))
            await killed.workers.score(killed.steps[0])
        return await killed.workers.train_step(killed.steps[0], -1)

    assert to_floats(killed.run(scenario()).metrics)["actor/grad_norm"] > 0
    assert "train workers start again (3 of at most 3)" in killed.reports[-2]
    assert psutil.wait_procs(stopped, timeout=10)[1] == [], "what stands still is ended too"


@pytest.fixture(scope="module")
def exported(killed: Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export from the run folder, as a user does it."""
    folder = tmp_path_factory.mktemp("export") / "hf"
    command = [sys.executable, "-m", "scripts.export_hf", str(killed.store.folder.parent), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}: the policy after 6 steps, from {killed.store.folder / 'step_000006'}\n"
    return folder


def test_the_export_is_the_trained_weights_and_loads_in_transformers(
    killed: Scene, exported: Path, tiny_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported)
    found = dict(model.named_parameters())
    ranks = killed.weights["twin"]
    assert found.keys() == ranks[0].keys()
    for name, parameter in found.items():
        assert torch.equal(parameter.detach(), torch.cat([rows[name] for rows in ranks])), name
    untrained = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    assert any((parameter != untrained[name]).any() for name, parameter in found.items())
    text = "Question: Tom has 3 pens.\nAnswer:"
    assert AutoTokenizer.from_pretrained(exported)(text) == AutoTokenizer.from_pretrained(tiny_model)(text)
    assert (exported / "generation_config.json").is_file()
