"""The pool of processes that compare answers, over fakes that start at once: they hang, die or are given up."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.rewards.math_verify import VerifierPool

FAKE_PROCESS = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "hang":
        time.sleep(600)
    if text == "die":
        sys.exit(1)
    print(json.dumps({"answer": text, "pid": os.getpid()}), flush=True)
"""
FAKE = (sys.executable, "-I", "-S", "-c", FAKE_PROCESS)


def with_pool(num_processes: int, timeout_s: float, work: Callable[[VerifierPool], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        pool = VerifierPool(num_processes, timeout_s, FAKE)
        try:
            async with asyncio.timeout(60):
                return await work(pool)
        finally:
            for process in pool._idle:
                process.kill()
                await process.communicate()

    return asyncio.run(main())


async def compare(pool: VerifierPool, text: str) -> int:
    """The process that answered."""
    reply = await pool.compare("7", text)
    assert reply is not None and reply["answer"] == text
    return reply["pid"]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_start_when_needed_and_are_used_again() -> None:
    async def work(pool: VerifierPool) -> None:
        first = await compare(pool, "7")
        assert await compare(pool, "8") == first
        used = await asyncio.gather(*(compare(pool, str(number)) for number in range(20)))
        assert len(set(used)) == 2 and first in used

    with_pool(2, 60, work)


def test_a_process_that_hangs_is_killed_and_replaced() -> None:
    async def work(pool: VerifierPool) -> None:
        first = await compare(pool, "7")
        pool._timeout_s = 0.2
        assert await pool.compare("7", "hang") is None
        assert not is_alive(first)
        pool._timeout_s = 60
        assert await compare(pool, "7") != first

    with_pool(1, 60, work)


def test_other_processes_answer_while_one_hangs() -> None:
    async def work(pool: VerifierPool) -> None:
        first = await compare(pool, "7")
        hanging = asyncio.create_task(pool.compare("7", "hang"))
        await asyncio.sleep(0)  # it takes the process that is there
        assert first not in [await compare(pool, "7") for _ in range(20)]
        assert not hanging.done()
        os.kill(first, signal.SIGKILL)
        assert await hanging is None

    with_pool(2, 60, work)


def test_a_process_that_dies_is_replaced() -> None:
    async def work(pool: VerifierPool) -> None:
        assert await pool.compare("7", "die") is None
        await compare(pool, "7")
        [process] = pool._idle
        process.kill()
        await process.wait()
        assert await pool.compare("7", "7") is None  # found dead when it is asked
        await compare(pool, "7")

    with_pool(1, 60, work)


def test_a_late_reply_never_answers_another_comparison() -> None:
    async def work(pool: VerifierPool) -> None:
        first = await compare(pool, "7")
        cancelled = asyncio.create_task(pool.compare("7", "7"))
        await asyncio.sleep(0)  # the request is written, its reply pending
        cancelled.cancel()
        assert await compare(pool, "8") != first

    with_pool(1, 60, work)


def test_a_start_that_is_cancelled_leaves_no_process_behind(tmp_path: Path) -> None:
    """As rollout.reward_timeout_s cancels it, the only deadline of a start."""
    started = tmp_path / "pid"
    silent = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    async def main() -> None:
        starting = asyncio.create_task(VerifierPool(1, 60, (sys.executable, "-c", silent)).compare("7", "7"))
        async with asyncio.timeout(60):
            while not started.exists() or not started.read_text():
                await asyncio.sleep(0.01)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            while is_alive(int(started.read_text())):
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_process_that_cannot_start_says_so() -> None:
    async def main() -> None:
        await VerifierPool(1, 60, (sys.executable, "-c", "raise SystemExit(1)")).compare("7", "7")

    with pytest.raises(RuntimeError, match="ended before it was ready: is math-verify installed?"):
        asyncio.run(main())
