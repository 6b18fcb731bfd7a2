"""Deadlines, and the pauses that do not count."""

import asyncio

import pytest

from configs.runtime.deadline import within
from rollout.fleet.paused_time import PausedTime
from tests.support.fakes import now, run_virtual


def test_a_deadline_without_pauses() -> None:
    async def main() -> None:
        for paused_s in (None, lambda: 7.0):
            began = now()
            with pytest.raises(TimeoutError, match=r"^waiting took longer than some.key=10$"):
                async with within(10, "some.key", "waiting", paused_s):
                    await asyncio.sleep(20)
            assert now() - began == 10
            async with within(10, "some.key", "waiting", paused_s):
                await asyncio.sleep(9)

    run_virtual(main())


@pytest.mark.parametrize("pauses", [[(3, 8)], [(1, 2), (9.5, 400)], [(0, 1), (10.9, 11.5), (11.55, 50)]])
def test_pauses_put_it_off_by_their_length(pauses: list[tuple[float, float]]) -> None:
    async def main() -> None:
        paused = PausedTime()

        async def tell() -> None:
            for begin, end in pauses:
                await asyncio.sleep(begin - now())
                paused.told("a", True)
                await asyncio.sleep(end - now())
                paused.told("a", False)

        telling = asyncio.create_task(tell())
        with pytest.raises(TimeoutError):
            async with within(10, "some.key", "waiting", paused.of_any):
                await asyncio.sleep(1e6)
        in_all = sum(end - begin for begin, end in pauses)
        assert now() == pytest.approx(10 + in_all, abs=0.06)
        await telling

    run_virtual(main())


def test_an_error_of_the_block_passes_and_later_nothing_comes() -> None:
    async def main() -> None:
        for error in (TimeoutError("its own"), OSError("broken")):
            with pytest.raises(type(error), match=str(error)):
                async with within(10, "some.key", "waiting", lambda: 0.0):
                    raise error
        await asyncio.sleep(100)

    run_virtual(main())


def test_pauses_of_several_replicas_count_once_together_and_each_for_itself() -> None:
    async def main() -> None:
        paused = PausedTime()
        for name, is_paused in (("a", True), ("b", True), ("b", True), ("a", False), ("b", False), ("a", False)):
            paused.told(name, is_paused)
            await asyncio.sleep(10)
        assert (paused.of("a"), paused.of("b"), paused.of("c"), paused.of_any()) == (30, 30, 0, 40)

    run_virtual(main())
