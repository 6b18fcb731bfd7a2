"""Ends what outlives episodes: pools, retrievers, connections. It is closed when the run ends."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from weakref import WeakKeyDictionary

Close = Callable[[], Awaitable[object]]
_at_end: WeakKeyDictionary[asyncio.AbstractEventLoop, list[Close]] = WeakKeyDictionary()


def at_end(close: Close) -> None:
    """Have `close` awaited when the run ends, once, on this event loop. For a harness, which is a function and so has
    no place for a `close` of its own."""
    _at_end.setdefault(asyncio.get_running_loop(), []).append(close)


async def end() -> None:
    """Close what was given to `at_end`. Raises as `close_all` does."""
    await close_all(_at_end.pop(asyncio.get_running_loop(), ()))


async def close_all(closes: Sequence[Close]) -> None:
    """Each is called, whatever the others raise. Raises an ExceptionGroup of what they raise."""
    outcomes = await asyncio.gather(*(close() for close in closes), return_exceptions=True)
    if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
        raise ExceptionGroup(f"{len(errors)} of {len(outcomes)} could not be closed: {errors!r:.500}", errors)
