"""The memory that this machine has, and what of a run does not fit into it."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from configs.schema import Config
from scripts.launch.cluster import nvidia_smi
from scripts.plan.memory import (
    Memory,
    Part,
    rank_memory,
    replica_worker_memory,
    shared_memory_bytes,
    teacher_worker_memory,
    total,
)
from scripts.plan.model_shape import ModelShape
from weight_sync.transports.cleanup import DIRECTORY

TOLERANCE = 1.15
"""The accuracy of the estimates, as a factor: a run that takes more than this beyond what is there is refused."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The memory of a machine in bytes. None where it is not known."""

    gpu: float | None
    host: float | None
    shared: float | None
    """Free in shared memory."""


def this_machine(config: Config) -> Machine:
    """Return the memory of this machine. Of a cluster that runs already only config.ray.gpu_memory_gb is known."""
    configured = None if config.ray.gpu_memory_gb is None else config.ray.gpu_memory_gb * 2**30
    if config.ray.address is not None:
        return Machine(gpu=configured, host=None, shared=None)
    shared = shutil.disk_usage(DIRECTORY).free
    return Machine(gpu=configured or smallest_gpu(), host=host_memory(), shared=shared)


def smallest_gpu() -> float | None:
    """Return the memory of the smallest GPU that nvidia-smi lists."""
    listed = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    sizes = [line.strip() for line in listed.splitlines()]
    if not sizes or not all(size.isdecimal() for size in sizes):
        return None
    return min(map(float, sizes)) * 2**20


def host_memory() -> float:
    """Return the memory of the container, or of the machine where nothing limits the container."""
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    whole = float(psutil.virtual_memory().total)
    return min(whole, float(limit)) if limit.isdecimal() else whole


def refusals(
    config: Config,
    shape: ModelShape,
    device: str,
    machine: Machine,
    teacher: ModelShape | None = None,
    rank: Memory | None = None,
) -> list[str]:
    """Return the reasons why the run cannot fit, each with the key to change.

    Args:
        teacher: the sizes of the teacher, where there is one and they are known.
        rank: the memory of a train worker as it was rehearsed; None: as it is computed.
    """
    rank = rank or rank_memory(config, shape, device)
    problems = [
        f"{_largest(need.parts).advice}: {need.what} {format_bytes(total(need.parts))} ({list_parts(need.parts)}), "
        f"and there are {format_bytes(need.room)}; most is {_largest(need.parts).name}"
        for need in _needs(config, shape, device, machine, teacher, rank)
        if total(need.parts) > need.room * TOLERANCE
    ]
    shared = shared_memory_bytes(config, shape)
    if machine.shared is not None and shared > machine.shared:
        problems.append(
            f"weight_sync.transport=shared_memory: needs {format_bytes(shared)} in {DIRECTORY}, "
            f"{format_bytes(machine.shared)} are free; a container gets more with --shm-size, and collective, cuda_ipc "
            "and filesystem need none"
        )
    return problems


@dataclass(frozen=True, slots=True)
class _Need:
    what: str
    parts: Sequence[Part]
    room: float


def _needs(
    config: Config, shape: ModelShape, device: str, machine: Machine, teacher: ModelShape | None, rank: Memory
) -> Iterator[_Need]:
    rollout, num_ranks = config.rollout, config.trainer.num_ranks
    teacher_memory = Memory((), ()) if teacher is None else teacher_worker_memory(config, teacher, device, machine.gpu)
    num_teachers = 0 if teacher is None else config.teacher.num_replicas * config.teacher.tensor_parallel_size
    worker = replica_worker_memory(config, shape, device, machine.gpu)
    num_workers = rollout.num_replicas * rollout.tensor_parallel_size * rollout.data_parallel_size
    if machine.gpu is not None and device == "cuda":
        if num_teachers and config.gpu_share <= 1 / 3:
            everyone = (*rank.device, *worker.device, *teacher_memory.device)
            yield _Need("a GPU of a rank, a replica and the teacher needs", everyone, machine.gpu)
        elif config.gpu_share < 1:
            yield _Need("a GPU of a rank and a replica needs", (*rank.device, *worker.device), machine.gpu)
        else:
            yield _Need("a train worker's GPU needs", rank.device, machine.gpu)
            if num_workers:
                yield _Need("a replica's GPU needs", worker.device, machine.gpu)
        if num_teachers:
            yield _Need("a GPU of the teacher's needs", teacher_memory.device, machine.gpu)
    if machine.host is not None:
        shared = Part("weights in shared memory", shared_memory_bytes(config, shape), "weight_sync.transport")
        on_host = [*_times(num_ranks, rank.host), *_times(num_workers, worker.host), shared]
        on_host += _times(num_teachers, teacher_memory.host)
        teachers = f" and {num_teachers} of the teacher" if num_teachers else ""
        who = f"{num_ranks} train worker(s) and {num_workers} of replicas{teachers}"
        yield _Need(f"{who} need host memory of", on_host, machine.host)


def _times(count: int, parts: Sequence[Part]) -> list[Part]:
    return [replace(part, num_bytes=count * part.num_bytes) for part in parts]


def _largest(parts: Sequence[Part]) -> Part:
    return max(parts, key=lambda part: part.num_bytes)


def list_parts(parts: Sequence[Part]) -> str:
    return ", ".join(f"{part.name} {format_bytes(part.num_bytes)}" for part in parts if part.num_bytes)


def format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
