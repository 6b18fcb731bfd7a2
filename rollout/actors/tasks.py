"""Coroutines that live and die together."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def run_with_background(main: Coroutine[Any, Any, None], background: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all concurrently until `main` returns, and then cancels the background. An error in any of them ends all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in background]
        await group.create_task(main)
        for task in tasks:
            task.cancel()
