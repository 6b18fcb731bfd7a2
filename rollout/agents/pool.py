"""Sandboxes that are started before an episode needs one: containers or browsers, whose start takes seconds."""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rollout.agents.threads import called

T = TypeVar("T")
logger = logging.getLogger(__name__)
LATE_S = 3600.0
"""A start that was given up and comes within so many seconds is still ended."""


class PoolClosedError(RuntimeError):
    """The pool hands out nothing any more."""


class Warmed(Generic[T]):
    """Keeps `size` of them started, one pool per agent worker. It begins when the first episode takes one.

    An episode has one for itself, and afterwards it is ended, unless it can be renewed. Each function may be async, or
    plain, which then runs in threads. All methods are called on one event loop.

    Example:
        SANDBOXES = Warmed(start_container, end=stop_container, size=8, timeout_s=30.0)

        class Shell:  # an environment
            async def reset(self):
                self.sandbox = await SANDBOXES.take()

            async def close(self):
                if self.sandbox is not None:
                    SANDBOXES.give_back(self.sandbox)
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        end: Callable[[T], Any],
        renew: Callable[[T], Any] | None = None,
        works: Callable[[T], Any] | None = None,
        size: int = 8,
        timeout_s: float = 60.0,
    ):
        """
        Args:
            make: starts one.
            end: stops one for good.
            renew: makes a used one as good as new, and raises where it cannot. With it the pool grows to as many as are
                used at once. None: one is used once.
            works: whether one that has waited is still fit for use; asked before it is handed out. None: it is.
            size: how many wait at most.
            timeout_s: deadline of each call of these functions.
        """
        if size < 1:
            raise ValueError(f"size={size}: must be at least 1")
        self._make, self._end, self._renew, self._works = make, end, renew, works
        self._size, self._timeout_s = size, timeout_s
        self._idle: deque[T] = deque()
        self._waiting: deque[asyncio.Future[T]] = deque()
        self._out: dict[int, T] = {}
        """The objects that episodes have, by `id`."""
        self._starting: set[asyncio.Task[Any]] = set()
        self._renewing: set[asyncio.Task[Any]] = set()
        self._ending: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def take(self) -> T:
        """Return one for the caller alone. Raises PoolClosedError, what `make` raises, and TimeoutError."""
        self._require_open()
        while self._idle:
            item = self._idle.popleft()
            if await self._is_fit(item):
                return self._handed_out(item)
            self._stop(item)
        self._require_open()
        waiting: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._fill()
        try:
            return self._handed_out(await waiting)  # it has a start of its own under way, which has a deadline
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._put(waiting.result())  # it came, and nobody is there any more
            raise

    def give_back(self, item: T, *, is_broken: bool = False) -> None:
        """Give back what `take` returned. It is renewed or ended meanwhile. `is_broken`: it is ended. Raises ValueError
        for what is not handed out: it may be another episode's by now."""
        if self._out.get(id(item)) is not item:
            raise ValueError(f"{item!r:.100} is not handed out: it was given back before, or is of another pool")
        del self._out[id(item)]
        if self._renew is None or is_broken or self._is_closed or len(self._idle) >= self._size:
            self._stop(item)
        else:
            self._keep(self._renewing, self._renewed(item))

    async def close(self) -> None:
        """End all that wait, also those that still start. Those that episodes have are ended when they come back.
        Whoever waits gets PoolClosedError. Returns when they have ended, or after timeout_s."""
        self._is_closed = True
        while (waiting := self._next_waiting()) is not None:
            waiting.set_exception(PoolClosedError("the pool was closed"))
        for starting in self._starting:
            starting.cancel()
        while self._idle:
            self._stop(self._idle.popleft())
        clock = asyncio.get_running_loop().time
        until = clock() + self._timeout_s
        while (unfinished := {*self._starting, *self._renewing, *self._ending}) and clock() < until:
            await asyncio.wait(unfinished, timeout=until - clock())
        if unfinished:
            logger.warning("%d of a pool have not ended after timeout_s=%g", len(unfinished), self._timeout_s)

    # -- taking --------------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._is_closed:
            raise PoolClosedError("the pool was closed")

    def _handed_out(self, item: T) -> T:
        self._out[id(item)] = item
        self._fill()
        return item

    async def _is_fit(self, item: T) -> bool:
        if self._works is None:
            return True
        try:
            return bool(await self._call(self._works, item, "works"))
        except asyncio.CancelledError:
            self._stop(item)
            raise
        except Exception as error:
            logger.warning("%r cannot say whether it works, and is replaced", item, exc_info=error)
            return False

    # -- starting ------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start as many as are missing: one for each who waits, and so many that `size` will be idle. Those that can be
        renewed come back."""
        if self._is_closed:
            return
        come_back = 0 if self._renew is None else len(self._out) + len(self._renewing)
        waiting = sum(not future.done() for future in self._waiting)
        missing = waiting + max(0, self._size - len(self._idle) - come_back)
        for _ in range(missing - len(self._starting)):
            self._keep(self._starting, self._start(), self._started)

    async def _start(self) -> T:
        starting = asyncio.create_task(called(self._make, LATE_S, "LATE_S", "a start for the pool"))
        try:
            await asyncio.wait({starting}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._give_up(starting)
            raise
        if not starting.done():
            self._give_up(starting)
            raise TimeoutError(f"a start for the pool took longer than timeout_s={self._timeout_s:g}")
        if starting.cancelled():
            raise RuntimeError("a start for the pool was cancelled by what it called")
        return starting.result()

    def _give_up(self, starting: asyncio.Task[T]) -> None:
        """End what comes after its deadline, or when nobody wants it any more. A thread cannot be stopped."""
        self._ending.add(starting)
        starting.add_done_callback(self._came_late)
        if inspect.iscoroutinefunction(self._make):
            starting.cancel()

    def _came_late(self, starting: asyncio.Task[T]) -> None:
        self._ending.discard(starting)
        if not starting.cancelled() and starting.exception() is None:
            self._stop(starting.result())

    def _started(self, start: asyncio.Task[T]) -> None:
        if start.cancelled():
            return
        error = start.exception()
        if error is None:
            self._put(start.result())
        elif (waiting := self._next_waiting()) is not None:
            waiting.set_exception(error)
        else:
            logger.warning("a start for the pool failed, and is tried again when the next is taken", exc_info=error)

    def _put(self, item: T) -> None:
        """Hand it to the first who waits, or keep it."""
        if self._is_closed:
            self._stop(item)
        elif (waiting := self._next_waiting()) is not None:
            waiting.set_result(item)
        elif len(self._idle) < self._size:
            self._idle.append(item)
        else:
            self._stop(item)

    def _next_waiting(self) -> asyncio.Future[T] | None:
        while self._waiting:
            if not (waiting := self._waiting.popleft()).done():
                return waiting
        return None

    # -- ending --------------------------------------------------------------------------------------------------------

    def _stop(self, item: T) -> None:
        self._keep(self._ending, self._stopped(item))

    async def _stopped(self, item: T) -> None:
        try:
            await self._call(self._end, item, "end")
        except Exception as error:  # nobody waits for it
            logger.warning("%r did not end, and may be left behind", item, exc_info=error)

    async def _renewed(self, item: T) -> None:
        assert self._renew is not None
        try:
            await self._call(self._renew, item, "renew")
        except Exception as error:
            logger.warning("%r could not be renewed, and is replaced", item, exc_info=error)
            await self._stopped(item)
        else:
            self._put(item)

    async def _call(self, function: Callable[[T], Any], item: T, name: str) -> Any:
        return await called(function, self._timeout_s, "timeout_s", f"{name} for the pool", item)

    @staticmethod
    def _keep(
        tasks: set[asyncio.Task[Any]], work: Any, then: Callable[[asyncio.Task[Any]], None] | None = None
    ) -> None:
        """Run `work` as one of the tasks, and call `then` once it is no longer among them."""
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if then is not None:
            task.add_done_callback(then)
