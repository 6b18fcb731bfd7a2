"""Deadlines name their key."""

import asyncio

import pytest

from configs.runtime.deadline import within
from tests.support.fakes import now


async def test_a_deadline_names_its_key() -> None:
    with pytest.raises(TimeoutError, match=r"^waiting took longer than some.key=10$"):
        async with within(10, "some.key", "waiting"):
            await asyncio.sleep(20)
    assert now() == 10
    async with within(10, "some.key", "waiting"):
        await asyncio.sleep(9)


@pytest.mark.parametrize("error", [TimeoutError("its own"), OSError("broken")])
async def test_an_error_of_the_block_passes_and_later_nothing_comes(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        async with within(10, "some.key", "waiting"):
            raise error
    await asyncio.sleep(100)
