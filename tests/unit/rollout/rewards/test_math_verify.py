"""The pool of processes that compare answers, over fakes that start at once: they hang, die or are given up."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollout.rewards.math_verify import VerifierPool

FAKE_PROCESS = """
import json, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "hang":
        time.sleep(600)
    if text == "die":
        sys.exit(1)
    print(json.dumps({"is_right": text == "7", "answer": text}), flush=True)
"""
FAKE = (sys.executable, "-I", "-S", "-c", FAKE_PROCESS)


def with_pool(num_processes: int, timeout_s: float, work: Callable[[VerifierPool], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        pool = VerifierPool(num_processes, timeout_s, FAKE)
        try:
            async with asyncio.timeout(60):
                return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def reply(text: str) -> dict[str, Any]:
    return {"is_right": text == "7", "answer": text}


def test_processes_start_when_needed_and_are_used_again() -> None:
    async def work(pool: VerifierPool) -> None:
        assert pool.processes == []
        assert await pool.compare("7", "7") == reply("7")
        [first] = pool.processes
        assert await pool.compare("7", "8") == reply("8")
        assert pool.processes == [first]
        texts = [str(number) for number in range(20)]
        assert await asyncio.gather(*(pool.compare("7", text) for text in texts)) == [reply(text) for text in texts]
        assert len(pool.processes) == 2 and first in pool.processes

    with_pool(2, 60, work)


def test_a_process_that_hangs_is_killed() -> None:
    async def work(pool: VerifierPool) -> None:
        hanging = asyncio.create_task(pool.compare("7", "hang"))
        while not pool.processes:
            await asyncio.sleep(0)
        [hung] = pool.processes
        assert await hanging is None
        assert pool.processes == []
        assert hung.returncode == -signal.SIGKILL and not is_alive(hung.pid)

    with_pool(1, 0.2, work)


def test_the_others_go_on_while_one_hangs() -> None:
    async def work(pool: VerifierPool) -> None:
        await pool.compare("7", "7")
        hanging = asyncio.create_task(pool.compare("7", "hang"))
        await asyncio.sleep(0)  # it takes the process that is there
        [hung] = pool.processes
        assert [await pool.compare("7", "7") for _ in range(20)] == [reply("7")] * 20
        assert not hanging.done()
        hung.kill()
        assert await hanging is None

    with_pool(2, 60, work)


def test_a_process_that_dies_is_replaced() -> None:
    async def work(pool: VerifierPool) -> None:
        assert await pool.compare("7", "die") is None
        assert await pool.compare("7", "7") == reply("7")
        [process] = pool.processes
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert await pool.compare("7", "7") is None  # found dead when it is asked
        assert await pool.compare("7", "7") == reply("7")

    with_pool(1, 60, work)


def test_a_late_reply_never_answers_another_comparison() -> None:
    async def work(pool: VerifierPool) -> None:
        await pool.compare("7", "7")
        [process] = pool.processes
        cancelled = asyncio.create_task(pool.compare("7", "7"))
        await asyncio.sleep(0)  # it has been asked, and its reply is under way
        cancelled.cancel()
        assert await pool.compare("7", "8") == reply("8")
        assert process not in pool.processes

    with_pool(1, 60, work)


def test_closing_ends_every_process() -> None:
    async def work(pool: VerifierPool) -> None:
        await asyncio.gather(*(pool.compare("7", "7") for _ in range(2)))
        processes = list(pool.processes)
        await pool.close()
        assert pool.processes == []
        assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
        assert not any(is_alive(process.pid) for process in processes)

    with_pool(2, 60, work)


def test_a_process_that_cannot_start_says_so() -> None:
    async def main() -> None:
        await VerifierPool(1, 60, (sys.executable, "-c", "raise SystemExit(1)")).compare("7", "7")

    with pytest.raises(RuntimeError, match="ended before it was ready: is math-verify installed?"):
        asyncio.run(main())
