"""Train workers that only load, each rank in a process of its own: what they hold, and how much memory it took."""

import ctypes
import gc
import multiprocessing
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist

from configs.schema import Config
from scripts.bench.common import peak_host_bytes
from tests.support.worker_runs import Inbox, free_master
from trainer.worker import worker as worker_module
from trainer.worker.loading import local, local_rows
from trainer.worker.worker import TrainWorker


@dataclass(frozen=True)
class LoadJob:
    config: Config
    model: Path
    num_ranks: int


@dataclass(frozen=True)
class Held:
    """The models of one rank."""

    rows: dict[str, tuple[slice, torch.Tensor]]
    """The rows of every parameter, by its name in the policy, the reference or the critic."""
    buffers: dict[str, torch.Tensor]
    base: int | None
    peak_bytes: int
    """Resident memory at its highest until now, over what the process had when it began to load."""


def load_on_ranks(jobs: Sequence[LoadJob], num_processes: int, folder: Path, timeout_s: float) -> list[list[Held]]:
    """Load every job, and return the outcomes by job, then by rank. A job for fewer ranks than there are processes
    is done several times."""
    masters = [[free_master() for _ in range(num_processes // job.num_ranks)] for job in jobs]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # what takes seconds is imported once
    answers = [folder / f"{place}.pickle" for place in range(num_processes)]
    processes = [
        context.Process(target=load_all, args=(jobs, place, masters, answer), daemon=True)
        for place, answer in enumerate(answers)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout_s)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    found = [pickle.loads(answer.read_bytes()) for answer in answers]
    return [[found[rank][index] for rank in range(job.num_ranks)] for index, job in enumerate(jobs)]


def load_all(jobs: Sequence[LoadJob], place: int, masters: Sequence[Sequence[str]], answer: Path) -> None:
    """Entry point of a process."""
    with patch.object(worker_module, "refuse_other_logprobs"):  # its forward would gather layers
        held = [
            hold(job, place % job.num_ranks, of_job[place // job.num_ranks])
            for job, of_job in zip(jobs, masters, strict=True)
        ]
    answer.write_bytes(pickle.dumps(held))


def hold(job: LoadJob, rank: int, master: str) -> Held:
    worker = TrainWorker(config=job.config, device="cpu", make_sender=Inbox())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the jobs before have freed would be taken again unseen
    before = psutil.Process().memory_info().rss
    worker.setup(str(job.model), rank, job.num_ranks, master)
    peak = peak_host_bytes() - before
    critic = None if worker._critic is None else worker._critic._model
    modules = {"policy": worker._policy, "reference": worker._reference, "critic": critic}
    parameters = {f"{part}.{name}": p for part, m in modules.items() if m for name, p in m.named_parameters()}
    buffers = {f"{part}.{name}": b for part, m in modules.items() if m for name, b in m.named_buffers()}
    rows = {name: (local_rows(p), local(p).clone()) for name, p in parameters.items()}
    base = None if worker._adapter is None else worker._adapter.base
    dist.barrier()  # rank 0 holds the store: it must not go first
    dist.destroy_process_group()
    return Held(rows, buffers, base, peak)
