"""TrainWorker driven step by step in processes of their own or in this one, and what came out of it."""

import contextlib
import math
import multiprocessing
import pickle
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from configs.schema import Config, DType, Layout
from rollout.types import FloatArray, TrajectoryGroup
from tests.support import batches
from tests.support.fakes import make_order
from tests.support.reference import VOCAB_SIZE
from trainer.batch import MicroBatch, StepBatch
from trainer.metrics import Metric, merge_metrics, to_floats
from trainer.tiny.model import build_model
from trainer.worker.worker import TrainWorker
from weight_sync.protocol import Manifest, PublishOrder, Sender, Shards, TensorSpec

T = TypeVar("T")
Weights = dict[str, torch.Tensor]
SAVED_AT = 2


@dataclass(frozen=True)
class Job:
    """Trains the steps from `load`'s on; saves before the step SAVED_AT, if it comes by there, while training on."""

    config: Config
    model_path: str
    steps: Sequence[StepBatch]
    save: str | None = None
    load: str | None = None

    def mine(self, batch: StepBatch, rank: int) -> tuple[MicroBatch, ...]:
        """Ranks that share rows have the same micro-batches."""
        return batch.micro_batches[rank // self.config.trainer.sequence_parallel]


@dataclass(frozen=True)
class RankRun:
    metrics: list[dict[str, Metric]]
    weights: Weights
    scores: dict[str, list[FloatArray]]
    logprobs: list[FloatArray]
    random: float
    """The next number of torch's generator at SAVED_AT."""
    error: str
    """The error of the save."""
    digests: list[str]
    """The digest of the weights before the first step and after each."""


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, float]]
    weights: Weights
    scores: dict[str, FloatArray] = field(default_factory=dict)
    logprobs: FloatArray | None = None
    """[T] over the last batch, after all steps."""
    ranks: Sequence[RankRun] = ()


class Inbox(Sender):
    """A transport that keeps this rank's rows."""

    def __init__(self) -> None:
        self.weights: Weights = {}

    def __call__(self, rank: int, num_ranks: int, device: torch.device) -> "Inbox":
        return self

    def publish(self, specs: Sequence[TensorSpec], shards: Shards, order: PublishOrder) -> Manifest:
        self.weights = {name: tensor.clone() for name, tensor in shards()}
        found = [(name, tensor.dtype, list(tensor.shape[1:])) for name, tensor in self.weights.items()]
        assert found == [(name, dtype, shape[1:]) for name, dtype, shape in specs]
        return Manifest(
            transport="inbox",
            global_steps=order.global_steps,
            nbytes=0,
            tensors=(),
            locations=(None,),
            checksums=((),),
        )

    def send(self, shards: Shards, manifest: Manifest) -> tuple[int, ...]:
        return ()

    def stop(self, manifest: Manifest) -> None: ...


@contextlib.contextmanager
def running_worker(config: Config, model_path: str) -> Iterator[tuple[TrainWorker, Inbox]]:
    """Set up one worker in this process, and leave its process group in the end."""
    inbox = Inbox()
    worker = TrainWorker(config=config, device="cpu", make_sender=inbox)
    try:
        worker.setup(model_path, 0, 1, free_master())
        yield worker, inbox
    finally:
        dist.destroy_process_group()


def free_master() -> str:
    """Return a port for later, outside the range that the system gives to processes that ask for any, as Ray does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


def pack(
    steps: Sequence[Sequence[TrajectoryGroup]], layout: Layout, num_ranks: int, budget: int = 48
) -> list[StepBatch]:
    return [batches.pack(groups, layout, num_ranks, budget) for groups in steps]


def train_rank(job: Job, rank: int, world_size: int, master: str) -> RankRun:
    """Take all steps of one rank in this process. Weights are gathered from all ranks; scores and logprobs are of the
    last batch."""
    inbox = Inbox()
    worker = TrainWorker(config=job.config, device="cpu", make_sender=inbox)
    torch.manual_seed(7 + rank)
    metrics, first, random, error = [], 0, math.nan, ""
    try:
        worker.setup(job.model_path, rank, world_size, master)
        if job.load is not None:
            torch.manual_seed(99)
            first = worker.load_checkpoint(job.load)
        digests = [worker.weights_digest()]
        for step in range(first, len(job.steps)):
            if step == SAVED_AT:
                if job.save is not None:
                    worker.stage_checkpoint(job.save)
                random = torch.rand(()).item()
            batch = job.steps[step]
            result = worker.train_step(job.mine(batch, rank), step, batch.optimizer_steps)
            metrics.append(result.metrics)
            digests.append(result.weights)
        if job.save is not None:
            try:
                worker.finish_checkpoint()
            except RuntimeError as failure:
                error = str(failure)
        scores = worker.score(job.mine(job.steps[-1], rank))
        logprobs = worker.logprobs(job.mine(job.steps[-1], rank))
        check_next_token_logprobs(worker, job.mine(job.steps[-1], rank), logprobs)
        assert worker._global_steps == len(job.steps)
        worker.publish(make_order(len(job.steps)))
        weights = {}
        for name, rows in inbox.weights.items():
            parts_of_all: list[Any] = [None] * world_size
            dist.all_gather_object(parts_of_all, rows)
            weights[name] = torch.cat(parts_of_all)
        dist.barrier()  # rank 0 holds the store: it must not go first
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return RankRun(metrics, weights, scores, logprobs, random, error, digests)


def check_next_token_logprobs(
    worker: TrainWorker, micro_batches: tuple[MicroBatch, ...], logprobs: list[FloatArray]
) -> None:
    """Check that the row of each target is a distribution, and has the target's own logprob in the target's column; and
    the sum of the squares of its probabilities."""
    every = worker.next_token_logprobs(micro_batches)
    for batch, own, (places, rows) in zip(micro_batches, logprobs, every, strict=True):
        if batch.tokens.ce_weights is not None:  # demonstrations are at temperature 1
            continue
        among = [batch.index.tolist().index(place) for place in places]
        atol = 2e-5 if worker._config.trainer.dtype is DType.float32 else 0.05
        np.testing.assert_allclose(rows[np.arange(len(among)), batch.tokens.targets[among]], own[among], atol=atol)
        np.testing.assert_allclose(np.exp(rows).sum(-1), 1, atol=1e-4)
        with torch.no_grad():
            squares = worker._policy.squared_probabilities(batch, worker._device)
        worker._policy.reshard()  # pyright: ignore  (as `TrainWorker.score` does in the end)
        np.testing.assert_allclose(squares.float().cpu()[among], np.exp(2 * rows).sum(-1), atol=atol)
        if worker._config.trainer.sequence_parallel == 1:
            assert sorted(places.tolist()) == sorted(batch.index.tolist())


def one_rank(job: Job) -> Outcome:
    return outcome([train_rank(job, 0, 1, free_master())], job)


def two_ranks(jobs: Mapping[str, Job], answer: Path, timeout_s: float) -> dict[str, Outcome]:
    """Every job on two ranks: rank 0 here, rank 1 in a process of its own, one process for all jobs."""
    return several_ranks(jobs, 2, answer, timeout_s)


def several_ranks(jobs: Mapping[str, Job], num_ranks: int, answer: Path, timeout_s: float) -> dict[str, Outcome]:
    """Every job on as many ranks, one process a rank for all jobs."""
    work = partial(train_jobs, [(job, num_ranks, free_master()) for job in jobs.values()])
    ranks = on_ranks(work, num_ranks, answer, timeout_s)
    return {name: outcome(of_job, jobs[name]) for name, *of_job in zip(jobs, *ranks, strict=True)}


def train_jobs(jobs: list[tuple[Job, int, str]], rank: int) -> list[RankRun]:
    return [train_rank(job, rank, num_ranks, master) for job, num_ranks, master in jobs]


def on_ranks(work: Callable[[int], T], num_ranks: int, answer: Path, timeout_s: float) -> list[T]:
    """Return what `work` returns for each rank: 0 here, each other in a process of its own, which writes it beside
    `answer`."""
    answers = {rank: answer.with_name(f"{answer.name}.{rank}") for rank in range(1, num_ranks)}
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=write_answer, args=(work, *other), daemon=True) for other in answers.items()]
    for other in others:
        other.start()
    try:
        first = work(0)
        for other in others:
            other.join(timeout_s)
            assert other.exitcode == 0
    finally:
        for other in others:
            other.kill()
            other.join(timeout_s)
    return [first, *(pickle.loads(path.read_bytes()) for path in answers.values())]


def write_answer(work: Callable[[int], object], rank: int, answer: Path) -> None:
    """Entry point of another process."""
    answer.write_bytes(pickle.dumps(work(rank)))


def outcome(ranks: Sequence[RankRun], job: Job) -> Outcome:
    """Merge the outcomes of all ranks. Of those that share rows, the first says it for all."""
    saying = ranks[:: job.config.trainer.sequence_parallel]
    return Outcome(
        [to_floats(merge_metrics(parts)) for parts in zip(*(rank.metrics for rank in saying), strict=True)],
        ranks[0].weights,
        {name: job.steps[-1].gather([rank.scores[name] for rank in saying]) for name in ranks[0].scores},
        job.steps[-1].gather([rank.logprobs for rank in saying]),
        ranks,
    )


def assert_same_weights(
    found: Weights, expected: Weights, tolerance: float = 1e-3, vocabulary: int = VOCAB_SIZE
) -> None:
    """Compare the weights of a run, whose first ones are those of seed 0, relative to how far they have moved."""
    assert found.keys() == expected.keys()
    for name, untrained in build_model(vocabulary, seed=0).named_parameters():
        moved = expected[name].double() - untrained.detach().double()
        error = found[name].double() - expected[name].double()
        assert error.norm() < tolerance * moved.norm(), f"{name}: {error.norm() / moved.norm():.1e}"


def assert_same_metrics(
    found: Outcome, expected: Outcome, *keys: str, tolerance: float = 1e-4, floor: float = 1e-7
) -> None:
    for key in keys:
        values = [metrics[key] for metrics in found.metrics]
        assert values == pytest.approx([metrics[key] for metrics in expected.metrics], rel=tolerance, abs=floor), key
