"""Answers questions of concurrent episodes together."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q", bound=Hashable)
A = TypeVar("A")


class Batches(Generic[Q, A]):
    """Collects the questions of concurrent tasks of one event loop. A question that is already waiting or under way is
    not asked twice.

    Example:
        batches = Batches(ask_all, max_size=64, max_running=8, delay_s=0.005)
        answer = await batches.answer("a question")
    """

    def __init__(
        self,
        ask: Callable[[Sequence[Q]], Awaitable[Sequence[A]]],
        *,
        max_size: int,
        max_running: int,
        delay_s: float = 0.0,
    ):
        """`ask` answers at most `max_size` questions, in their order; what it raises, all who asked them get.
        `max_running`: calls of it at once. `delay_s`: how long a question waits for others; 0 takes those of one turn
        of the event loop."""
        self._ask, self._max_size, self._max_running, self._delay_s = ask, max_size, max_running, delay_s
        self._waiting: dict[Q, asyncio.Future[A]] = {}
        self._under_way: dict[Q, asyncio.Future[A]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def answer(self, question: Q) -> A:
        """Return the answer. Raises what `ask` raises. A caller that is cancelled takes nothing away from the
        others."""
        future = self._under_way.get(question) or self._waiting.get(question)
        if future is None:
            future = self._waiting[question] = asyncio.get_running_loop().create_future()
            future.add_done_callback(_look)
            self._start_soon()
        return await asyncio.shield(future)

    async def close(self) -> None:
        """End the calls that are under way, and cancel everybody who waits."""
        if self._timer is not None:
            self._timer.cancel()
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _start_soon(self) -> None:
        if len(self._waiting) >= self._max_size:
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            batch = {question: self._waiting.pop(question) for question in [*self._waiting][: self._max_size]}
            self._under_way |= batch
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()  # the questions that waited for room have waited for others long enough

    async def _run(self, batch: dict[Q, asyncio.Future[A]]) -> None:
        try:
            answers = await self._ask([*batch])
            for future, answer in zip(batch.values(), answers, strict=True):
                future.set_result(answer)
                await asyncio.sleep(
                    0
                )  # let other tasks in: the one that asked may work on the answer for a millisecond
        except Exception as error:
            for future in batch.values():
                if not future.done():
                    future.set_exception(error)
        finally:
            for question, future in batch.items():
                future.cancel()
                self._under_way.pop(question, None)


def _look(future: asyncio.Future[A]) -> None:
    """Keep asyncio from reporting an error that nobody waits for any more."""
    if not future.cancelled():
        future.exception()
