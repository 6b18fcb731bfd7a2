"""Threads for rewards are kept from group to group: on the real clock, since threads know no other."""

import asyncio
import threading

import pytest

from rollout.rewards import scoring
from rollout.rewards.scoring import score
from rollout.rewards.threads import MAX_IDLE, RewardThreads
from rollout.types import Prompt
from tests.support.fakes import make_prompt


async def idle(threads: RewardThreads, count: int) -> None:
    """They are so a moment after the last reward has been told."""
    async with asyncio.timeout(30):
        while len(threads._idle) < count:
            await asyncio.sleep(0)


def test_the_next_group_finds_a_thread_unless_that_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs is left behind, and costs the next group no patience."""
    monkeypatch.setattr(scoring, "PATIENCE_S", 30.0)
    release = threading.Event()
    used: list[threading.Thread] = []

    def reward(prompt: Prompt, text: str) -> float:
        used.append(threading.current_thread())
        if text == "hang":
            release.wait(30)
        return 1.0

    async def main() -> None:
        threads = RewardThreads()
        for text, timeout_s in (("a", 30.0), ("b", 30.0), ("hang", 0.1), ("c", 30.0), ("d", 30.0)):
            (result,) = await score(reward, [(make_prompt(0), text)], timeout_s, threads)
            assert (result.error is None) is (text != "hang")
            if text != "hang":
                await idle(threads, 1)
        first, _, _, second, _ = used
        assert used == [first] * 3 + [second] * 2 and first is not second
        release.set()

    asyncio.run(main())


def test_of_many_threads_a_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "PATIENCE_S", 0.01)
    barrier = threading.Barrier(3 * MAX_IDLE, timeout=30)
    used: list[threading.Thread] = []

    def meets(prompt: Prompt, text: str) -> float:
        used.append(threading.current_thread())
        barrier.wait()
        return 1.0

    async def main() -> None:
        threads = RewardThreads()
        scored = await score(meets, [(make_prompt(0), "a")] * 3 * MAX_IDLE, 30, threads)
        assert [result.reward for result in scored] == [1.0] * 3 * MAX_IDLE
        await idle(threads, MAX_IDLE)
        async with asyncio.timeout(30):
            while sum(thread.is_alive() for thread in used) > 2 * MAX_IDLE:
                await asyncio.sleep(0.01)

    asyncio.run(main())
