"""Workers that take turns. One that is lost is replaced, and meanwhile the others go on."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
W = TypeVar("W")


class NoWorkerLeftError(RuntimeError):
    """The last worker was lost, and none could be started in its place. The cause says why."""


class Rotation(Generic[W]):
    def __init__(self, workers: Iterable[W], replace: Callable[[W], Awaitable[W]]):
        """`replace(lost)`: a worker that serves in its place."""
        self._serving = deque(workers)
        self._replace = replace
        self._replacing: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None

    @property
    def serving(self) -> list[W]:
        return list(self._serving)

    async def next(self) -> W:
        """Waits until one serves. Raises NoWorkerLeftError."""
        while not self._serving:
            if not self._replacing:
                raise NoWorkerLeftError(f"no agent worker is left: {self._error}") from self._error
            await asyncio.wait(self._replacing, return_when=asyncio.FIRST_COMPLETED)
        self._serving.rotate(-1)
        return self._serving[-1]

    def lose(self, worker: W) -> None:
        """Idempotent: whoever it worked for tells of its loss."""
        if worker in self._serving:
            self._serving.remove(worker)
            self._replacing.add(asyncio.create_task(self._bring_another(worker)))

    async def _bring_another(self, lost: W) -> None:
        try:
            self._serving.append(await self._replace(lost))
        except Exception as error:
            logger.warning("an agent worker is not replaced", exc_info=error)
            self._error = error
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._replacing.discard(task)
