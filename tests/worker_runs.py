"""TrainWorker driven step by step in a process of its own or in this one, and what came out of it."""

import pickle
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.schema import Config, Layout
from rollout.types import TrajectoryGroup
from tests import batches
from trainer.batch import StepBatch
from trainer.metrics import Metric
from trainer.worker import TrainWorker

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, float]]
    weights: Weights


class Inbox:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.weights: Weights = {}

    def __call__(
        self, specs: list[tuple[str, torch.dtype, list[int]]], tensors: Iterator[tuple[str, torch.Tensor]], tag: int
    ) -> dict[str, Any]:
        self.weights = {name: tensor.clone() for name, tensor in tensors}
        assert specs == [(name, tensor.dtype, list(tensor.shape)) for name, tensor in self.weights.items()]
        return {"global_steps": tag}


def free_master() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def pack(
    steps: Sequence[Sequence[TrajectoryGroup]], layout: Layout, num_ranks: int, budget: int = 48
) -> list[StepBatch]:
    return [batches.pack(groups, layout, num_ranks, budget) for groups in steps]


def train_rank(
    config: Config, model_path: str, step_batches: Sequence[StepBatch], rank: int, world_size: int, master: str
) -> tuple[list[dict[str, Metric]], Weights]:
    """All steps of one rank, in this process. Weights are those of rank 0."""
    inbox = Inbox()
    worker = TrainWorker(config=config, device="cpu", publish=inbox)
    try:
        worker.setup(model_path, rank, world_size, master)
        parts = [worker.train_step(batch.micro_batches[rank], step) for step, batch in enumerate(step_batches)]
        manifest = worker.publish(len(step_batches))
        assert manifest == ({"global_steps": len(step_batches)} if rank == 0 else None)
        dist.barrier()  # rank 0 holds the store: it must not go first
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return parts, inbox.weights


def train_second_rank(jobs: list[tuple[Any, ...]], answer: Path) -> None:
    """Entry point of the other process: rank 1 of every job, its metrics written to a file."""
    answer.write_bytes(pickle.dumps([train_rank(*job, rank=1, world_size=2, master=m)[0] for *job, m in jobs]))
