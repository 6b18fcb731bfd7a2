"""Every wait has a deadline, and every deadline is a config key that the error names."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def within(seconds: float, key: str, what: str) -> AsyncIterator[None]:
    """Raise TimeoutError "<what> took longer than <key>=<seconds>" when the block does; its own errors pass."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise TimeoutError(f"{what} took longer than {key}={seconds}") from None
