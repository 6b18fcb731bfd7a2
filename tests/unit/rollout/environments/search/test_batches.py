"""Questions of concurrent tasks are answered together, each once."""

import asyncio
from collections.abc import Sequence

import pytest

from rollout.environments.search.batches import Batches
from tests.support.fakes import settle


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


async def test_no_more_calls_run_than_may_and_a_question_under_way_is_joined() -> None:
    double = Asked()
    batches = Batches(double, max_size=1, max_running=2)
    first = [asyncio.create_task(batches.answer(number)) for number in range(5)]
    await asyncio.sleep(0.5)
    assert await batches.answer(0) == 0 and double.calls == [[0], [1]]
    assert await asyncio.gather(*first) == [0, 2, 4, 6, 8]
    assert double.most == 2 and len(double.calls) == 5


async def test_an_error_reaches_all_who_asked_and_one_who_leaves_takes_nothing_away() -> None:
    batches = Batches(Asked(), max_size=2, max_running=1)
    outcomes = await asyncio.gather(*map(batches.answer, (13, 1)), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["13", "13"]
    leaves, stays = (asyncio.create_task(batches.answer(7)) for _ in range(2))
    await settle()
    leaves.cancel()
    assert await stays == 14


async def test_close_ends_what_is_under_way_and_what_waits() -> None:
    batches = Batches(Asked(), max_size=1, max_running=1)
    asking = [asyncio.create_task(batches.answer(number)) for number in range(2)]
    await asyncio.sleep(0.5)
    await batches.close()
    for task in asking:
        with pytest.raises(asyncio.CancelledError):
            await task
