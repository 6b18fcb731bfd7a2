"""The Ray cluster of a run, and the resources it must offer."""

import asyncio
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray

from configs.runtime.deadline import within
from configs.runtime.environment import take_environment
from configs.runtime.network import join_network
from configs.schema import Config, Device, RayConfig
from configs.validate import ConfigError, check
from rollout.agents.worker_group import CPUS_PER_WORKER
from rollout.replica.replica_group import manifest_ref
from scripts.command.command import STUCK, is_stuck
from scripts.launch.head import Head, watched
from scripts.launch.nodes import forwarded
from scripts.launch.placement import num_teachers
from scripts.launch.process_logs import write_output_to
from weight_sync import background

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's new default, without the warning
NVIDIA_SMI_S = 30.0
"""A driver that loads first takes seconds."""
LOOK_S = 0.5
"""The time after which a command looks again whether Ray has come up."""
LOCAL_ENV = {"RAY_enable_metrics_collection": "0", "RAY_task_events_report_interval_ms": "0"}
"""A cluster that lives as long as the run has no dashboard, which alone would read what these collect."""


def resolve_device(config: Config) -> str:
    """Return "cpu" or "cuda". Raises ConfigError where a GPU lacks, except under dry_run, which may plan for another
    machine, and where device=auto becomes one that other keys contradict."""
    device, address = config.device.value, config.ray.address
    if address is not None and "://" in address:
        raise ConfigError(f"ray.address={address}: must be auto, local or host:port, as `ray start` prints it")
    if config.device is Device.auto and address is None:
        planned_for_gpus = config.dry_run and config.rollout.kv_cache_mb is None
        device = "cuda" if planned_for_gpus or has_gpu() else "cpu"
    elif config.device is Device.auto:
        source = " (from RAY_ADDRESS)" if address == os.environ.get("RAY_ADDRESS") else ""
        raise ConfigError(f"device=auto: with ray.address={address}{source} say which one, cpu or cuda")
    if device == "cpu" and config.rollout.kv_cache_mb is None:
        raise ConfigError("rollout.kv_cache_mb=None: on CPU the KV cache needs a size in MiB (null is for GPUs)")
    if device == "cuda" and address is None and not config.dry_run and not has_gpu():
        raise ConfigError("device=cuda: nvidia-smi lists no GPU on this machine; device=cpu runs without")
    problems = _problems(replace(config, device=Device(device)))  # that were not seen while it was auto
    if config.device is Device.auto and (new := [line for line in problems if line not in _problems(config)]):
        raise ConfigError("\n".join(f"{line} (device=auto is {device} here)" for line in new))
    return device


def _problems(config: Config) -> list[str]:
    try:
        check(config, needed_files=())
    except ConfigError as error:
        return str(error).splitlines()
    return []


def without_trainer(config: Config) -> Config:
    """Return the config of a command that does not train, so that it claims no GPU for it."""
    return replace(config, trainer=replace(config.trainer, num_ranks=0))


def with_most_replicas(config: Config) -> Config:
    """Return the config of a run that begins with as many replicas as it may add: rollout.autoscale.max_replicas."""
    rollout = config.rollout
    most = rollout.autoscale.max_replicas if config.trainer.num_ranks and rollout.num_replicas else None
    return replace(config, rollout=replace(rollout, num_replicas=most or rollout.num_replicas))


def needed_resources(config: Config, device: str) -> dict[str, int]:
    """Return the resources that the actors of a run claim."""
    rollout, trainer, teachers = config.rollout, config.trainer, num_teachers(config)
    gpus = 0
    if device == "cuda":
        per_replica = rollout.tensor_parallel_size * rollout.data_parallel_size
        per_gpu = math.floor(1 / config.gpu_share)  # no process of a shared GPU is on two GPUs
        teacher_gpus = teachers * config.teacher.tensor_parallel_size
        gpus = math.ceil((rollout.num_replicas * per_replica + trainer.num_ranks + teacher_gpus) / per_gpu)
    cpus = rollout.num_replicas + teachers + trainer.num_ranks + math.ceil(CPUS_PER_WORKER * rollout.num_agent_workers)
    return {"CPU": cpus, "GPU": gpus}


@asynccontextmanager
async def cluster(config: Config, device: str) -> AsyncIterator[Head]:
    """Connect to Ray or start it, and shut it down on exit, which ends every actor of this run. Yields the head, which
    is watched where it may be on another machine.

    A local cluster claims to have as many CPUs as the actors need, because two cores can run three busy processes, and
    one more, or as many as rollout.autoscale may bring: `slipstream fleet add` may bring a replica.

    Raises:
        ConfigError: nothing answers at ray.address, or the local cluster lacks GPUs.
    """
    local: dict[str, Any] = {}
    if config.ray.address is None:
        needed, most = (needed_resources(sized, device)["CPU"] for sized in (config, with_most_replicas(config)))
        local = {"num_cpus": max(needed + 1, most, os.cpu_count() or 1)}
        os.environ.update(LOCAL_ENV)

    def connect() -> None:
        ray.init(
            address=config.ray.address or "local",
            include_dashboard=None if config.ray.address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **local,
        )

    try:
        if config.ray.address is None:
            await _connected(connect, config.ray.start_timeout_s)
            _refuse_too_small(config, device)
            async with _lives(own_raylet()):
                yield Head()
        else:
            await _joined(config.ray.address, connect, config.ray.start_timeout_s)
            async with _lives(own_raylet()), watched(ray.get_runtime_context().gcs_address) as head:
                yield head
    finally:
        manifest_ref.cache_clear()
        if not is_stuck():
            await asyncio.shield(asyncio.to_thread(ray.shutdown))


def _refuse_too_small(config: Config, device: str) -> None:
    offered = ray.cluster_resources()
    teacher_keys = (
        f", teacher.num_replicas={config.teacher.num_replicas} x teacher.tensor_parallel_size="
        f"{config.teacher.tensor_parallel_size}"
    )
    most = with_most_replicas(config)
    for key, sized in {"rollout.num_replicas": config, "rollout.autoscale.max_replicas": most}.items():
        for resource, count in needed_resources(sized, device).items():
            if offered.get(resource, 0) < count:
                raise ConfigError(
                    f"{key}={sized.rollout.num_replicas} x rollout.tensor_parallel_size="
                    f"{config.rollout.tensor_parallel_size} x rollout.data_parallel_size="
                    f"{config.rollout.data_parallel_size}{teacher_keys if num_teachers(config) else ''} and "
                    f"trainer.num_ranks={config.trainer.num_ranks} need "
                    f"{count} {resource}s with gpu_share={config.gpu_share:g}; "
                    f"the cluster has {offered.get(resource, 0):g}"
                )


class RayDiedError(RuntimeError):
    """The process of Ray that runs everything on this machine has ended."""


def own_raylet() -> list[psutil.Process]:
    """Return the raylet that this process is connected to; none where it cannot be seen from here."""
    own = ray.get_runtime_context().get_node_id()
    (socket_name,) = (node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == own)
    raylets: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile, or is another user's
            if process.name() == "raylet" and f"--raylet_socket_name={socket_name}" in process.cmdline():
                raylets.append(process)
    return raylets


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


async def _joined(address: str, connect: Callable[[], object], timeout_s: float) -> None:
    """Call `connect`, which joins the cluster at ray.address, once something answers there.

    Ray itself waits for minutes, in a thread that nothing can end: at the deadline, or when this is cancelled, it is
    left behind, and the process ends over it (`scripts.command.command.Main.exit`).

    Raises:
        ConfigError: there is no cluster that could be joined.
    """
    last = "it does not answer as Ray does"
    how = "`ray start --head` on a first machine starts a cluster, `ray start --address=HOST:6379` lets another join it"
    try:
        async with asyncio.timeout(timeout_s):
            host, _, port = address.rpartition(":")
            while port.isdigit() and (problem := await _refusal(host.strip("[]"), int(port))):  # `auto` has none
                last = problem  # the head may start after this command
                await asyncio.sleep(LOOK_S)
            await asyncio.shield(asyncio.wrap_future(background.start(STUCK, connect)))
    except TimeoutError:
        why = f"no cluster answered within ray.start_timeout_s={timeout_s:g}: {last}"
        raise ConfigError(f"ray.address={address}: {why}; {how}") from None
    except (ConnectionError, ValueError, RuntimeError) as error:  # what ray.init raises where it cannot join
        why = " ".join(str(error).split())[:500]
        raise ConfigError(f"ray.address={address}: {why}; {how}") from error
    finally:
        _take_sigterm_back()


async def _refusal(host: str, port: int) -> str:
    """Return why nothing can be connected to there, or an empty text."""
    problem = ""
    for name in (host, ray.util.get_node_ip_address()) if host in ("localhost", "127.0.0.1") else (host,):
        try:
            _, writer = await asyncio.open_connection(name, port)
        except OSError as error:
            problem = str(error)
        else:
            writer.close()
            return ""
    return problem


def _take_sigterm_back() -> None:
    """Put Python's handler back where Ray has put its own, under Python: that one prints a stack, calls Python's, and
    aborts the process when it is still shutting down three seconds later (`alarm_on_failure_secs` of abseil)."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.siginterrupt(signal.SIGTERM, False)  # as asyncio has it


def set_up_in(run_dir: Path, section: RayConfig) -> Callable[[str], Callable[[], None]]:
    """Return the function that maps a name to what the actor of that name calls first: its output and its children's
    go to logs/<name>.log, it takes over the environment of this process, and it joins the network of the run.

    The environment is no `runtime_env` of Ray's, whose agents write all of that into their logs, secrets too.
    """
    variables = forwarded(section)
    return lambda name: partial(_set_up, run_dir / "logs" / f"{name}.log", variables, section.network_interface)


def _set_up(log: Path, variables: Mapping[str, str], network_interface: str | None) -> None:
    write_output_to(log)
    take_environment(variables, own=ray.get_runtime_context().runtime_env.get("env_vars") or ())
    address = join_network(ray.util.get_node_ip_address(), network_interface)
    sys.stdout.write(f"{log.stem} is process {os.getpid()} on {socket.gethostname()} ({address})\n")


def has_gpu() -> bool:
    """Return whether nvidia-smi lists a GPU on this machine. Raises ConfigError as `nvidia_smi` does."""
    return "GPU" in nvidia_smi("-L")


def nvidia_smi(*options: str) -> str:
    """Return what nvidia-smi prints, and nothing where it is not installed or fails. Raises ConfigError where it does
    not answer, as beside a GPU that hangs: a run must not take such a machine for one without GPUs."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"device: {' '.join(command)} has not answered for {NVIDIA_SMI_S:g} s; a GPU or its driver may hang. "
            "device=cpu runs without"
        ) from None
    return done.stdout if done.returncode == 0 else ""
