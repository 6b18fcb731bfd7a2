"""TrainWorker driven step by step in a process of its own or in this one, and what came out of it."""

import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from configs.schema import Config, Layout
from rollout.types import TrajectoryGroup
from tests.reference import advantages_of
from trainer.batch import StepBatch, assemble
from trainer.metrics import Metric
from trainer.worker import Shards, Specs, TrainWorker

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, float]]
    weights: Weights


class Inbox:
    """A transport that keeps what it is given: this rank's rows."""

    def __init__(self) -> None:
        self.weights: Weights = {}

    def __call__(self, rank: int, num_ranks: int, device: torch.device) -> "Inbox":
        return self

    def publish(self, specs: Specs, shards: Shards, order: dict[str, Any]) -> dict[str, Any]:
        self.weights = {name: tensor.clone() for name, tensor in shards()}
        found = [(name, tensor.dtype, list(tensor.shape[1:])) for name, tensor in self.weights.items()]
        assert found == [(name, dtype, shape[1:]) for name, dtype, shape in specs]
        return {"global_steps": order["global_steps"]}

    def send(self, shards: Shards, manifest: dict[str, Any]) -> list[int]:
        return []

    def close(self) -> None: ...


def free_master() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def pack(
    steps: Sequence[Sequence[TrajectoryGroup]], layout: Layout, num_ranks: int, budget: int = 48
) -> list[StepBatch]:
    return [
        assemble(
            groups,
            [np.array(advantages_of(group), np.float32) for group in groups],
            layout=layout,
            num_ranks=num_ranks,
            tokens_per_micro_batch=budget,
        )
        for groups in steps
    ]


def train_rank(
    config: Config, model_path: str, batches: Sequence[StepBatch], rank: int, world_size: int, master: str
) -> tuple[list[dict[str, Metric]], Weights]:
    """All steps of one rank, in this process, and the whole weights, put together from the rows of all ranks."""
    inbox = Inbox()
    worker = TrainWorker(config=config, device="cpu", make_sender=inbox)
    try:
        worker.setup(model_path, rank, world_size, master)
        parts = [
            worker.train_step(batch.micro_batches[rank], batch.num_loss_tokens, step)
            for step, batch in enumerate(batches)
        ]
        manifest = worker.publish({"global_steps": None})
        assert manifest == {"global_steps": len(batches)}
        weights = {}
        for name, rows in inbox.weights.items():
            parts_of_all: list[Any] = [None] * world_size
            dist.all_gather_object(parts_of_all, rows)
            weights[name] = torch.cat(parts_of_all)
        dist.barrier()  # rank 0 holds the store: it must not go first
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return parts, weights


def train_second_rank(jobs: list[tuple[Any, ...]], answer: Path) -> None:
    """Entry point of the other process: rank 1 of every job, its metrics written to a file."""
    answer.write_bytes(pickle.dumps([train_rank(*job, rank=1, world_size=2, master=m)[0] for *job, m in jobs]))
