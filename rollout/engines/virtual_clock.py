"""An event loop on a virtual clock: scheduling is simulated without waiting, and repeats exactly."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Jumps the clock to the next timer, where a real loop would sleep until it. Without a timer, it is a deadlock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        self.now += max(timeout, 0.0)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, on a virtual clock: a sleep of an hour takes no time, and a deadlock raises RuntimeError."""
    results: list[T] = []

    async def keep_result() -> None:  # does not return it: the Runner would take the repr of its task at the end
        results.append(await main)

    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        runner.run(keep_result())
    return results[0]
