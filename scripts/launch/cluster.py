"""The Ray cluster of a run, the resources it must offer, and the log files of its processes."""

import asyncio
import math
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import ray

from configs.runtime.deadline import within
from configs.schema import Config, Device
from configs.validate import ConfigError
from rollout.replica.replica_group import manifest_ref
from scripts.launch.placement import num_teachers

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's new default, without the warning
LOCAL_ENV = {"RAY_enable_metrics_collection": "0", "RAY_task_events_report_interval_ms": "0"}
"""A cluster that lives as long as the run has no dashboard, which alone would read what these collect."""


def resolve_device(config: Config) -> str:
    """Returns "cpu" or "cuda". Raises ConfigError where a GPU lacks, except under dry_run, which may plan for another
    machine."""
    device = config.device.value
    if config.device is Device.auto and config.ray.address is None:
        planned_for_gpus = config.dry_run and config.rollout.kv_cache_mb is None
        device = "cuda" if planned_for_gpus or has_gpu() else "cpu"
    elif config.device is Device.auto:
        raise ConfigError(f"device=auto: with ray.address={config.ray.address} say which one, cpu or cuda")
    if device == "cpu" and config.rollout.kv_cache_mb is None:
        raise ConfigError("rollout.kv_cache_mb=None: on CPU the KV cache needs a size in MiB (null is for GPUs)")
    if device == "cuda" and config.ray.address is None and not config.dry_run and not has_gpu():
        raise ConfigError("device=cuda: nvidia-smi lists no GPU on this machine; device=cpu runs without")
    return device


def without_trainer(config: Config) -> Config:
    """The config of a command that does not train, so that it claims no GPU for it."""
    return replace(config, trainer=replace(config.trainer, num_ranks=0))


def needed_resources(config: Config, device: str) -> dict[str, int]:
    """What the actors of a run claim, and one CPU for the tasks that make models."""
    rollout, trainer, teachers = config.rollout, config.trainer, num_teachers(config)
    gpus = 0
    if device == "cuda":
        per_replica = rollout.tensor_parallel_size * rollout.data_parallel_size
        per_gpu = math.floor(1 / config.gpu_share)  # no process of a shared GPU is on two GPUs
        of_teacher = teachers * config.teacher.tensor_parallel_size
        gpus = math.ceil((rollout.num_replicas * per_replica + trainer.num_ranks + of_teacher) / per_gpu)
    cpus = rollout.num_replicas + teachers + trainer.num_ranks + math.ceil(0.1 * rollout.num_agent_workers) + 1
    return {"CPU": cpus, "GPU": gpus}


@asynccontextmanager
async def cluster(config: Config, device: str) -> AsyncIterator[None]:
    """Connects to Ray or starts it, and shuts it down on exit, which ends every actor of this run.

    A local cluster claims to have as many CPUs as the actors need, because two cores can run three busy processes.
    Raises ConfigError if the cluster lacks GPUs or CPUs.
    """
    needed = needed_resources(config, device)
    local = {}
    if config.ray.address is None:
        local = {"num_cpus": max(needed["CPU"], os.cpu_count() or 1)}
        os.environ.update(LOCAL_ENV)
    connect = partial(
        ray.init,
        address=config.ray.address or "local",
        include_dashboard=None if config.ray.address else False,
        log_to_driver=False,
        logging_level="ERROR",
        **local,
    )
    try:
        await _connected(connect, config.ray.start_timeout_s)
        offered = ray.cluster_resources()
        for resource, count in needed.items():
            if offered.get(resource, 0) < count:
                of_teacher = (
                    f", teacher.num_replicas={config.teacher.num_replicas} x teacher.tensor_parallel_size="
                    f"{config.teacher.tensor_parallel_size}"
                )
                raise ConfigError(
                    f"rollout.num_replicas={config.rollout.num_replicas} x rollout.tensor_parallel_size="
                    f"{config.rollout.tensor_parallel_size} x rollout.data_parallel_size="
                    f"{config.rollout.data_parallel_size}{of_teacher if num_teachers(config) else ''} and "
                    f"trainer.num_ranks={config.trainer.num_ranks} need "
                    f"{count} {resource}s with gpu_share={config.gpu_share:g}; "
                    f"the cluster has {offered.get(resource, 0):g}"
                )
        async with _lives(_raylets() if config.ray.address is None else []):
            yield
    finally:
        manifest_ref.cache_clear()
        await asyncio.shield(asyncio.to_thread(ray.shutdown))


class RayDiedError(RuntimeError):
    """The process of Ray that runs everything on this machine has ended."""


def _raylets() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if child.name() == "raylet":
                found.append(child)
    return found


@asynccontextmanager
async def _lives(processes: Sequence[psutil.Process]) -> AsyncIterator[None]:
    """Run the block while the processes live. Raises RayDiedError when one has ended.

    Ray itself ends this process, without a word and with everything left behind, when it touches the object store,
    which went with the raylet. Where that comes before this has noticed the end, no error of ours is told.

    Once the block is being cancelled, by a signal that all processes of its group may have got, their end is no error,
    and hurries that of the block.
    """
    loop, block, ended = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
    was_stopped = False
    assert block is not None
    descriptors = {os.pidfd_open(process.pid): process.pid for process in processes}

    def end(descriptor: int) -> None:
        nonlocal was_stopped
        loop.remove_reader(descriptor)
        ended.append(descriptors[descriptor])
        if len(ended) == 1:
            was_stopped = block.cancelling() > 0
            block.cancel()

    for descriptor in descriptors:
        loop.add_reader(descriptor, end, descriptor)
    try:
        yield
    except asyncio.CancelledError:
        if not ended or was_stopped:
            raise
        block.uncancel()
        raise RayDiedError(f"Ray's raylet, process {ended[0]}, has ended: killed, or out of memory") from None
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
            os.close(descriptor)


async def _connected(connect: Callable[[], object], timeout_s: float) -> None:
    """Call `connect` in a thread. When cancelled, wait for its end all the same: a shutdown beside it would take away
    the processes that it waits for, which it then does for a minute, and ends this process."""
    connecting = asyncio.create_task(asyncio.to_thread(connect))
    try:
        async with within(timeout_s, "ray.start_timeout_s", "starting Ray"):
            await asyncio.shield(connecting)
    except asyncio.CancelledError:
        await asyncio.wait([connecting], timeout=timeout_s)
        raise
    finally:
        _take_sigterm_back()


def _take_sigterm_back() -> None:
    """Puts Python's handler back where Ray has put its own, under Python: that one prints a stack, calls Python's, and
    aborts the process when it is still shutting down three seconds later (`alarm_on_failure_secs` of abseil)."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.siginterrupt(signal.SIGTERM, False)  # as asyncio has it


def output_to(run_dir: Path) -> Callable[[str], Callable[[], None]]:
    """Maps a name to what a process calls first, so that its output and its children's go to logs/<name>.log."""
    return lambda name: partial(_redirect_output, run_dir / "logs" / f"{name}.log")


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def has_gpu() -> bool:
    """Whether nvidia-smi lists a GPU on this machine."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout
