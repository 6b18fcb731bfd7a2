"""Every wait has a deadline, and every deadline is a config key: the error says which."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

LOOK_S = 0.05
"""At most so late does a deadline come that pauses put off."""


@asynccontextmanager
async def within(
    seconds: float, key: str, what: str, paused_s: Callable[[], float] | None = None
) -> AsyncIterator[None]:
    """Raises TimeoutError "<what> took longer than <key>=<seconds>" when the block does. A TimeoutError from inside
    the block passes unchanged. `paused_s`: for how many seconds, since ever, it could not go on; those do not count."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            if paused_s is None:
                yield
            else:
                with _put_off(deadline, seconds, paused_s):
                    yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise TimeoutError(f"{what} took longer than {key}={seconds}") from None


@contextmanager
def _put_off(deadline: asyncio.Timeout, seconds: float, paused_s: Callable[[], float]) -> Iterator[None]:
    """Within the block the deadline is where the pauses since its beginning have moved it."""
    loop = asyncio.get_running_loop()
    at_first = loop.time() + seconds - paused_s()
    deadline.reschedule(None)

    def look() -> None:
        nonlocal looking
        now, due = loop.time(), at_first + paused_s()
        if due <= now:
            deadline.reschedule(now)
        else:
            looking = loop.call_at(max(due, now + LOOK_S), look)

    looking = loop.call_later(seconds, look)
    try:
        yield
    finally:
        looking.cancel()
