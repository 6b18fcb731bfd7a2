"""Loops that live and die together."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_first_ends(main: Coroutine[Any, Any, None], beside: list[Coroutine[Any, Any, None]]) -> None:
    """Runs all at once until `main` returns; the others may return before it. An error in any ends all of them."""
    async with asyncio.TaskGroup() as group:
        helpers = [group.create_task(helper) for helper in beside]
        await group.create_task(main)
        for helper in helpers:
            helper.cancel()
