"""TrainWorker's state on disk: staged while training goes on, loaded into as many ranks as there are."""

import multiprocessing
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from configs.schema import AlgorithmConfig, Config, CriticConfig, Layout, RolloutConfig, TrainerConfig
from tests.support import batches
from tests.support.fakes import make_order
from tests.support.reference import VOCAB_SIZE, double, random_groups
from tests.support.worker_runs import Inbox, Weights, free_master
from trainer.batch import StepBatch
from trainer.metrics import Metric, merge_metrics, to_floats
from trainer.tiny.model import build_model
from trainer.worker.state import policy_weights
from trainer.worker.worker import TrainWorker

TIMEOUT_S = 60.0
NUM_STEPS, SAVED_AT = 4, 2
CONFIG = Config(
    algorithm=AlgorithmConfig(advantage="gae"),
    critic=CriticConfig(lr=3e-3, value_clip=0.1),
    rollout=RolloutConfig(temperature=0.8),
    trainer=TrainerConfig(lr=3e-3, lr_warmup_steps=3, weight_decay=0.1, max_grad_norm=0.05, step_timeout_s=TIMEOUT_S),
)
KEYS = ("actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/vf_loss", "critic/grad_norm")


@dataclass(frozen=True)
class Job:
    """Trains the steps from `load`'s on; saves before the step SAVED_AT, if it comes by there, while training on."""

    model_path: str
    steps: Sequence[StepBatch]
    save: str | None = None
    load: str | None = None


@dataclass(frozen=True)
class RankRun:
    metrics: list[dict[str, Metric]]
    weights: Weights
    random: float
    error: str = ""


def run_rank(job: Job, rank: int, world_size: int, master: str) -> RankRun:
    inbox = Inbox()
    worker = TrainWorker(config=CONFIG, device="cpu", make_sender=inbox)
    torch.manual_seed(7 + rank)
    metrics, first, error = [], 0, ""
    random = float("nan")
    try:
        worker.setup(job.model_path, rank, world_size, master)
        if job.load is not None:
            torch.manual_seed(99)
            first = worker.load_checkpoint(job.load)
        for step in range(first, len(job.steps)):
            if step == SAVED_AT:
                if job.save is not None:
                    worker.stage_checkpoint(job.save)
                random = torch.rand(()).item()
            metrics.append(worker.train_step(job.steps[step].micro_batches[rank], step))
        if job.save is not None:
            try:
                worker.finish_checkpoint()
            except RuntimeError as failure:
                error = str(failure)
        assert worker._global_steps == len(job.steps)
        worker.publish(make_order(len(job.steps)))
        weights = {}
        for name, rows in inbox.weights.items():
            parts: list[Any] = [None] * world_size
            dist.all_gather_object(parts, rows)
            weights[name] = torch.cat(parts)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return RankRun(metrics, weights, random, error)


def second_rank(jobs: list[Job], masters: list[str], answer: Path) -> None:
    runs = [run_rank(job, 1, 2, master) for job, master in zip(jobs, masters, strict=True)]
    answer.write_bytes(pickle.dumps(runs))


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, float]]
    ranks: list[RankRun]

    @property
    def weights(self) -> Weights:
        return self.ranks[0].weights


def outcome(*ranks: RankRun) -> Outcome:
    merged = [to_floats(merge_metrics(parts)) for parts in zip(*(rank.metrics for rank in ranks), strict=True)]
    return Outcome([{key: metrics[key] for key in KEYS} for metrics in merged], list(ranks))


def one_rank(job: Job) -> Outcome:
    return outcome(run_rank(job, 0, 1, free_master()))


def two_ranks(jobs: list[Job], answer: Path) -> list[Outcome]:
    masters = [free_master() for _ in jobs]
    other = multiprocessing.get_context("spawn").Process(target=second_rank, args=(jobs, masters, answer), daemon=True)
    other.start()
    try:
        first = [run_rank(job, 0, 2, master) for job, master in zip(jobs, masters, strict=True)]
        other.join(TIMEOUT_S)
        assert other.exitcode == 0
    finally:
        other.kill()
        other.join(TIMEOUT_S)
    return [outcome(*pair) for pair in zip(first, pickle.loads(answer.read_bytes()), strict=True)]


@dataclass(frozen=True)
class Scene:
    folder: Path
    one: Outcome
    """Undisturbed, on one rank; saved while it went on. Likewise `two`."""
    two: Outcome
    one_from_one: Outcome
    one_from_two: Outcome
    two_from_one: Outcome
    two_from_two: Outcome
    failed: Outcome
    """Two ranks that cannot write."""


@pytest.fixture(scope="module")
def scene(process_as_it_was: None, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("checkpoints")
    model = build_model(VOCAB_SIZE, seed=0)
    model.save_pretrained(folder / "model")
    groups = [random_groups(double(model), seed=seed, temperature=0.8) for seed in range(NUM_STEPS)]
    alone = Job(str(folder / "model"), [with_values(of_step, 1) for of_step in groups])
    both = Job(str(folder / "model"), [with_values(of_step, 2) for of_step in groups])
    (folder / "full").write_text("a file, in the way of the folder")
    saved = str(folder / "by_one"), str(folder / "by_two")
    one = one_rank(replace(alone, save=saved[0]))
    two, two_from_one, two_from_two, failed = two_ranks(
        [
            replace(both, save=saved[1]),
            replace(both, load=saved[0]),
            replace(both, load=saved[1]),
            replace(both, save=str(folder / "full" / "x")),
        ],
        folder / "answer.pickle",
    )
    one_from_one, one_from_two = (one_rank(replace(alone, load=path)) for path in saved)
    return Scene(folder, one, two, one_from_one, one_from_two, two_from_one, two_from_two, failed)


def with_values(groups: Any, num_ranks: int) -> StepBatch:
    count = sum(int(trajectory.loss_mask.sum()) for group in groups for trajectory in group.trajectories)
    values, returns = np.random.default_rng(0).normal(size=(2, count)).astype(np.float32)
    return batches.pack(groups, Layout.padded, num_ranks, 48, keep_idle=True, values=values, returns=returns)


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_the_same_number_of_ranks_goes_on_bit_for_bit(scene: Scene, ranks: str) -> None:
    """From the state of SAVED_AT, although training went on while it was being written."""
    whole, resumed = (scene.one, scene.one_from_one) if ranks == "one" else (scene.two, scene.two_from_two)
    assert resumed.metrics == whole.metrics[SAVED_AT:]
    assert resumed.weights.keys() == whole.weights.keys()
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
    assert [rank.random for rank in resumed.ranks] == [rank.random for rank in whole.ranks]
    assert len({rank.random for rank in whole.ranks}) == len(whole.ranks)


@pytest.mark.parametrize("ranks", ["1 -> 2", "2 -> 1"])
def test_another_number_of_ranks_goes_on_with_the_same_losses_and_gradients(scene: Scene, ranks: str) -> None:
    whole, resumed = (scene.one, scene.two_from_one) if ranks == "1 -> 2" else (scene.two, scene.one_from_two)
    for found, expected in zip(resumed.metrics, whole.metrics[SAVED_AT:], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
    for name, weight in whole.weights.items():
        assert torch.allclose(resumed.weights[name], weight, rtol=0, atol=1e-5), name
    assert resumed.ranks[0].random == whole.ranks[0].random


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_every_rank_and_training_goes_on(scene: Scene) -> None:
    assert ["NotADirectoryError" in rank.error for rank in scene.failed.ranks] == [True, True]
    assert scene.failed.metrics == scene.two.metrics
    assert [rank.error for rank in scene.two.ranks] == ["", ""]


def test_the_policy_can_be_read_whole_without_ranks(scene: Scene) -> None:
    by_two, by_one = (policy_weights(scene.folder / name) for name in ("by_two", "by_one"))
    expected = build_model(VOCAB_SIZE, seed=0).state_dict()
    assert by_two.keys() == by_one.keys() == expected.keys()
    assert {name: tensor.shape for name, tensor in by_two.items()} == {n: t.shape for n, t in expected.items()}
    assert all(torch.allclose(by_two[name], by_one[name], rtol=0, atol=1e-5) for name in expected)
    assert any((by_two[name] != expected[name]).any() for name in expected)
