"""One request of a harness while it is answered."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from rollout.agents.loop import Abortable, GenerateGroup
from rollout.errors import ReplicaLostError
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest

logger = logging.getLogger(__name__)
ABORT_S = 5.0
"""The seconds that an engine may take to end requests that nobody waits for."""


class Call:
    """The generations of a request that is under way. Several clients may wait for them: a client that lost its
    connection asks again.

    Example:
        call = Call([3], [request_id], generate)
        call.start(answer())      # awaits call.generated(requests)
        await call.wait()         # by each client
        if not call.num_waiting:  # they have all gone
            call.give_up()
    """

    def __init__(self, numbers: Sequence[int], request_ids: Sequence[RequestId], generate: GenerateGroup):
        """`numbers` are those of the generations, and `request_ids` name their requests at the engine."""
        self.numbers = tuple(numbers)
        self.num_waiting = 0
        self.failure: Exception | None = None
        """The error that `generate` raised."""
        self._request_ids, self._generate = tuple(request_ids), generate
        self._is_generating = False
        self._task: asyncio.Task[None]
        self._ending: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(work)

    async def generated(self, requests: list[GenerationRequest]) -> list[Completion]:
        self._is_generating = True
        try:
            return await self._generate(requests)
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._is_generating = False

    async def wait(self) -> None:
        """Return when the work is done, or raise what it raises."""
        self.num_waiting += 1
        try:
            await asyncio.shield(self._task)  # a client that leaves must not end the work that others wait for
        finally:
            self.num_waiting -= 1

    def give_up(self) -> None:
        """End a call that nobody waits for any more. Requests at an engine end there within a step, and `generated`
        returns what it had sampled."""
        if self._is_generating and isinstance(self._generate, Abortable):
            self._ending = asyncio.create_task(self._abort(self._generate))
        else:
            self.cancel()

    async def _abort(self, generate: Abortable) -> None:
        try:
            async with asyncio.timeout(ABORT_S):
                if await generate.abort(self._request_ids):
                    await asyncio.wait([self._task])
        except (TimeoutError, ReplicaLostError) as error:
            logger.warning("tokens that were sampled for a client that went away are lost: %r", error)
        finally:
            self._task.cancel()

    def cancel(self) -> None:
        """End the call at once. Tokens that an engine has sampled for it are lost."""
        for task in (self._ending, self._task):
            if task is not None:
                task.cancel()

    async def ended(self) -> None:
        """Return when the work has ended, in whatever way."""
        await asyncio.wait([self._task])
