"""Coroutines that live and die together, or with the event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any


async def run_with_background(main: Coroutine[Any, Any, None], background: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all concurrently until `main` returns, and then cancels the background. An error in any of them ends all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in background]
        await group.create_task(main)
        for task in tasks:
            task.cancel()


async def end_with_loop(end: Callable[[], None]) -> None:
    """Wait for the end of the event loop, which cancels its tasks, and call `end`: for what nobody else closes."""
    try:
        await asyncio.Event().wait()
    finally:
        end()
