"""Signals before and while Ray is started, and the end of Ray."""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from configs.validate import ConfigError
from scripts.launch.cluster import RayDiedError, _connected, _joined, _lives
from tests.support.paths import ROOT
from tests.support.real_clock import on_real_clock

COMMAND = """
import sys, time
from scripts.command import command
def busy(given):
    print("importing", flush=True)
    for _ in range(100):
        try:
            time.sleep(0.1)
        except BaseException:  # as libraries do
            pass
    return command.Ended(exit_code=0)
command.Main(name="train", command=busy).exit(sys.argv[1:])
"""


@contextmanager
def started(code: str, *arguments: str, number: signal.Signals) -> Iterator[subprocess.Popen[str]]:
    """Start Python with this code, in which the signal has its default handler: a background job ignores some."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_before_anything_is_started_ends_the_command_at_once(number: signal.Signals, tmp_path: Path) -> None:
    with started(COMMAND, "dry_run=true", f"hydra.run.dir={tmp_path}", number=number) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.wait(5) == 130
        assert process.stderr.read() == "stopped before anything was started\n"


AFTER_THE_LOOP = """
import asyncio, sys, time
from scripts.command import command
def busy(given):
    command.run_async(asyncio.sleep(0))
    print("audits", flush=True)
    time.sleep(60)
command.Main(name="train", command=busy).exit(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_after_the_training_ends_a_sweep_with_its_table(number: signal.Signals, tmp_path: Path) -> None:
    with started(AFTER_THE_LOOP, "-m", "seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep", number=number) as process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() not in ("audits\n", ""):
            pass
        process.send_signal(number)
        assert process.wait(10) == 130
        assert "not run" in process.stdout.read() and "before anything was started" not in process.stderr.read()


@on_real_clock
async def test_a_connection_that_is_being_made_is_not_shut_down_under_it() -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def connect() -> None:
        began.set()
        may_end.wait(10)
        ended.set()

    connecting = asyncio.create_task(_connected(connect, timeout_s=10))
    await asyncio.to_thread(began.wait, 10)
    connecting.cancel()
    asyncio.get_running_loop().call_later(0.2, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert ended.is_set()


@on_real_clock
async def test_the_end_of_ray_ends_the_block_and_the_end_of_the_block_leaves_ray_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        raylet = psutil.Process(process.pid)
        async with _lives([raylet]):
            await asyncio.sleep(0.01)
        assert process.poll() is None
        with pytest.raises(RayDiedError, match=f"raylet, process {process.pid}, has ended"):
            async with _lives([raylet]):
                process.kill()
                await asyncio.sleep(10)
    await asyncio.sleep(0)  # not cancelled any more


@on_real_clock
async def test_processes_that_the_signal_ends_too_make_no_error_of_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:

        async def block() -> None:
            async with _lives([psutil.Process(process.pid)]):
                try:
                    await asyncio.sleep(10)
                finally:
                    process.kill()
                    await asyncio.sleep(10)

        task = asyncio.create_task(block())
        await asyncio.sleep(0.01)
        task.cancel()
        async with asyncio.timeout(5):
            assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)


@on_real_clock
async def test_a_handler_that_a_library_puts_under_pythons_is_replaced() -> None:
    """Ray puts such a handler there, which aborts a shutdown of more than three seconds."""
    ignore = ctypes.c_void_p(1)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await _connected(lambda: ctypes.CDLL(None).signal(signal.SIGTERM, ignore), timeout_s=10)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stopped.wait(), 5)


@on_real_clock
async def test_a_connection_that_hangs_is_an_error_at_its_deadline() -> None:
    hangs = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"starting Ray took longer than ray.start_timeout_s=0.1"):
            await _connected(lambda: hangs.wait(10), timeout_s=0.1)
    finally:
        hangs.set()


JOINING = """
import sys, time
import ray
from scripts.command import command
from scripts.launch.cluster import cluster
def init(**_):
    print("joins", flush=True)
    time.sleep(3600)
ray.init = init
async def join(config):
    async with cluster(config, "cpu"):
        raise AssertionError
def busy(given):
    command.run_async(join(given.config))
command.Main(name="train", command=busy).exit(sys.argv[1:])
"""


@contextmanager
def joining(folder: Path, timeout_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a command that joins a cluster at an address that somebody else has."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        keys = [f"ray.address={address}", f"ray.start_timeout_s={timeout_s}", "device=cpu", f"hydra.run.dir={folder}"]
        with started(JOINING, *keys, number=signal.SIGTERM) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "joins\n"
            yield process, address


@pytest.mark.slow
def test_a_command_that_cannot_join_a_cluster_ends_at_its_deadline(tmp_path: Path) -> None:
    with joining(tmp_path, timeout_s=1.0) as (process, address):
        assert process.wait(60) == 1
        assert process.stderr is not None
        expected = f"config error: ray.address={address}: no cluster answered within ray.start_timeout_s=1: it does not"
        assert expected in process.stderr.read()


def test_a_signal_ends_a_command_that_cannot_join_a_cluster(tmp_path: Path) -> None:
    with joining(tmp_path, timeout_s=3600.0) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130


@on_real_clock
async def test_a_cluster_that_comes_up_late_is_joined_and_one_that_does_not_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with pytest.raises(ConfigError, match=rf"ray.address={address}: no cluster .*=0.1: .*{port}.*`ray start --head`"):
        await _joined(address, lambda: None, timeout_s=0.1)
    joined = threading.Event()
    late = asyncio.create_task(_joined(address, joined.set, timeout_s=60))
    await asyncio.sleep(0.1)
    with socket.create_server(("127.0.0.1", port)):
        await late
    assert joined.is_set()
    with pytest.raises(ConfigError, match=r"ray.address=auto: Could not find any running Ray instance"):
        await _joined(
            "auto", raising(ConnectionError("Could not find any running Ray instance.\nPlease")), timeout_s=60
        )


def raising(error: Exception) -> Callable[[], None]:
    def connect() -> None:
        raise error

    return connect
