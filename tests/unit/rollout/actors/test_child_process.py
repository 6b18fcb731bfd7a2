"""Programs are started and talked to on either event loop, and nothing of this process can hold them up."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from rollout.actors.child_process import ChildProcess

Run = Callable[[Coroutine[Any, Any, None]], None]
LARGE = os.urandom(1_000_000)


@pytest.fixture(params=[asyncio.run, uvloop.run])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


def test_streams_exit_code_and_signals(run: Run) -> None:
    async def main() -> None:
        script = "import sys; sys.stderr.write('e'); sys.stdout.buffer.write(sys.stdin.buffer.read()); sys.exit(3)"
        process = await ChildProcess.start(sys.executable, "-c", script, start_new_session=True)
        process.stdin.write(LARGE)
        reading = asyncio.create_task(process.stdout.read())
        await process.stdin.drain()
        process.stdin.close()
        assert (await reading, await process.stderr.read(), await process.wait()) == (LARGE, b"e", 3)
        process.kill()  # it has ended, and gets nothing
        other = await ChildProcess.start("sleep", "60")
        assert other.returncode is None
        other.terminate()
        assert await other.wait() == other.returncode == -15

    run(main())


def test_what_cannot_be_started_is_an_error_and_no_descriptor_is_left(run: Run) -> None:
    async def main() -> None:
        open_files = set[str]()
        for attempt in range(5):
            process = await ChildProcess.start("true")
            process.stdin.close()
            assert (await process.stdout.read(), await process.stderr.read(), await process.wait()) == (b"", b"", 0)
            with pytest.raises(FileNotFoundError):
                await ChildProcess.start("/no/such/program")
            with pytest.raises(ValueError, match="null byte"):
                await ChildProcess.start("echo", "a\0b")
            await asyncio.sleep(0.05)  # closing a pipe takes the event loop a turn
            open_now = set(os.listdir("/proc/self/fd"))
            assert open_now == open_files or attempt == 0, "the first lets the event loop open what it keeps"
            open_files = open_now

    run(main())


def test_the_end_is_told_while_others_hold_the_streams(run: Run) -> None:
    async def main() -> None:
        process = await ChildProcess.start("sh", "-c", "sleep 60 & echo $!")
        assert await process.wait() == 0
        os.kill(int(await process.stdout.readline()), 9)

    run(main())


HELD = """
import os, threading, uvloop
from rollout.actors.child_process import ChildProcess

lock = threading.Lock()
os.register_at_fork(after_in_child=lock.acquire)

async def main():
    lock.acquire()
    process = await ChildProcess.start("echo", "started")
    print(await process.stdout.read())

uvloop.run(main())
"""


def test_a_lock_that_another_thread_holds_does_not_hold_up_a_start() -> None:
    """As it would for good with `asyncio.create_subprocess_exec` on uvloop."""
    ended = subprocess.run([sys.executable, "-c", HELD], capture_output=True, timeout=60, check=False)
    assert ended.stdout == b"b'started\\n'\n", ended.stderr.decode()
