"""Questions of concurrent tasks are answered together, each once."""

import asyncio
from collections.abc import Sequence

import pytest

from rollout.search.batches import Batches
from tests.support.fakes import run_virtual, settle


class Asked:
    """Doubles numbers, in a second; notes its calls, and how many run at once."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.running = self.most = 0

    async def __call__(self, numbers: Sequence[int]) -> list[int]:
        self.calls.append([*numbers])
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(1)
        self.running -= 1
        if 13 in numbers:
            raise ValueError("13")
        return [2 * number for number in numbers]


def test_what_comes_within_the_delay_is_one_call_and_nothing_is_asked_twice() -> None:
    async def main() -> None:
        asked = Asked()
        batches = Batches(asked, max_size=3, max_running=2, delay_s=0.1)
        answers = await asyncio.gather(*(batches.answer(number) for number in (1, 2, 1, 3, 4, 2)))
        assert answers == [2, 4, 2, 6, 8, 4]
        assert asked.calls == [[1, 2, 3], [4]]  # three are a call at once, the fourth waits for others

    run_virtual(main())


def test_no_more_calls_run_than_may_and_a_question_under_way_is_joined() -> None:
    async def main() -> None:
        asked = Asked()
        batches = Batches(asked, max_size=1, max_running=2)
        first = [asyncio.create_task(batches.answer(number)) for number in range(5)]
        await asyncio.sleep(0.5)
        assert await batches.answer(0) == 0 and asked.calls == [[0], [1]]
        assert await asyncio.gather(*first) == [0, 2, 4, 6, 8]
        assert asked.most == 2 and len(asked.calls) == 5

    run_virtual(main())


def test_an_error_reaches_all_who_asked_and_one_who_leaves_takes_nothing_away() -> None:
    async def main() -> None:
        batches = Batches(Asked(), max_size=2, max_running=1)
        outcomes = await asyncio.gather(*map(batches.answer, (13, 1)), return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["13", "13"]
        leaves, stays = (asyncio.create_task(batches.answer(7)) for _ in range(2))
        await settle()
        leaves.cancel()
        assert await stays == 14

    run_virtual(main())


def test_close_ends_what_is_under_way_and_what_waits() -> None:
    async def main() -> None:
        batches = Batches(Asked(), max_size=1, max_running=1)
        asking = [asyncio.create_task(batches.answer(number)) for number in range(2)]
        await asyncio.sleep(0.5)
        await batches.close()
        for task in asking:
            with pytest.raises(asyncio.CancelledError):
                await task

    run_virtual(main())
