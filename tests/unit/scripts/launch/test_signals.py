"""Signals before and while Ray is started, and the end of Ray."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from scripts.launch.cluster import RayDiedError, _connected, _lives
from tests.support.paths import ROOT

COMMAND = """
import sys, time
from scripts.launch import command
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_before_anything_is_started_ends_the_command_at_once(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, "dry_run=true", f"hydra.run.dir={tmp_path}"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a background job or nohup ignores some
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.wait(5) == 130
        assert process.stderr.read() == "stopped before anything was started\n"


AFTER_THE_LOOP = """
import asyncio, sys, time
from scripts.launch import command
def busy(given):
    command.run_async(asyncio.sleep(0))
    print("audits", flush=True)
    time.sleep(60)
command.Main(name="train", command=busy).exit(sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_after_the_training_ends_a_sweep_with_its_table(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", AFTER_THE_LOOP, "-m", "seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() not in ("audits\n", ""):
            pass
        process.send_signal(number)
        assert process.wait(10) == 130
        assert "not run" in process.stdout.read() and "before anything was started" not in process.stderr.read()


def test_a_connection_that_is_being_made_is_not_shut_down_under_it() -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def connect() -> None:
        began.set()
        may_end.wait(10)
        ended.set()

    async def main() -> None:
        connecting = asyncio.create_task(_connected(connect, timeout_s=10))
        await asyncio.to_thread(began.wait, 10)
        connecting.cancel()
        asyncio.get_running_loop().call_later(0.2, may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert ended.is_set()

    asyncio.run(main())


def test_the_end_of_ray_ends_the_block_and_the_end_of_the_block_leaves_ray_alone() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_processes_that_the_signal_ends_too_make_no_error_of_it() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_a_handler_that_a_library_puts_under_pythons_is_replaced() -> None:
    """As Ray does it, whose handler aborts a shutdown of more than three seconds."""
    ignore = ctypes.c_void_p(1)

    async def main() -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await _connected(lambda: ctypes.CDLL(None).signal(signal.SIGTERM, ignore), timeout_s=10)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stopped.wait(), 5)

    asyncio.run(main())


def test_a_connection_that_hangs_is_an_error_at_its_deadline() -> None:
    hangs = threading.Event()

    async def main() -> None:
        try:
            with pytest.raises(TimeoutError, match=r"starting Ray took longer than ray.start_timeout_s=0.1"):
                await _connected(lambda: hangs.wait(10), timeout_s=0.1)
        finally:
            hangs.set()

    asyncio.run(main())
