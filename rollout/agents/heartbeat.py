"""Finds out that an agent worker hangs: a loop or a reward that blocks its event loop stops everything it runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollout.errors import AgentWorkerLostError

logger = logging.getLogger(__name__)
PARTS = 4
"""The time to answer is waited for in so many parts. Where the driver itself stood still, only one of them is over."""
MOST_NAMED = 8


class Heartbeat:
    """Asks a worker again and again, while it has calls under way, whether it still answers.

    Example:
        heartbeat = Heartbeat("agent-worker-0", started, beat, config.rollout.agent_worker_timeout_s)
        group = await heartbeat.guard(call, [prompt.ordinal])
    """

    def __init__(
        self,
        name: str,
        started: Callable[[], Awaitable[object]],
        beat: Callable[[], Awaitable[object]],
        timeout_s: float,
    ):
        """`started` is awaited until it has returned once, without a deadline. `timeout_s`:
        rollout.agent_worker_timeout_s."""
        self._name, self._started, self._beat, self._timeout_s = name, started, beat, timeout_s
        self._calls: dict[asyncio.Future[Any], Sequence[int]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._has_started = False
        self._silent_parts = 0
        """Parts of the time to answer that are over since the last answer; also those of earlier watches."""

    async def guard(self, call: Awaitable[Any], ordinals: Sequence[int]) -> Any:
        """Return what the call returns, or raise what it raises. `ordinals`: of the prompts that it runs.

        Raises:
            AgentWorkerLostError: the worker answers no more. The message names the prompts that it ran.
        """
        answer = asyncio.ensure_future(call)
        self._calls[answer] = ordinals
        if self._watch is None or (self._watch.done() and self._watch.exception() is None):  # it gave up asking
            self._watch = asyncio.create_task(self._keep_asking())
        watch = self._watch
        try:
            await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                watch.result()
            return await answer
        finally:
            answer.cancel()
            del self._calls[answer]
            if not self._calls:
                watch.cancel()
                self._watch = None

    async def _keep_asking(self) -> None:
        """Raises AgentWorkerLostError. Other errors are those of a worker that died, of which every call tells."""
        try:
            if not self._has_started:  # a worker that hangs would not answer that either
                await self._started()
                self._has_started = True
            while await self._answers():
                await asyncio.sleep(self._timeout_s / PARTS)
        except Exception as error:
            logger.warning("%s cannot be asked whether it hangs: %r", self._name, error)
            return
        ordinals = sorted({ordinal for ordinals in self._calls.values() for ordinal in ordinals})
        named = ", ".join(map(str, ordinals[:MOST_NAMED])) + (", ..." if len(ordinals) > MOST_NAMED else "")
        raise AgentWorkerLostError(
            f"{self._name} answered nothing for rollout.agent_worker_timeout_s={self._timeout_s:g} seconds: an agent "
            f"loop or a reward of prompt {named} blocks it, and its log ends with the place in the code"
        )

    async def _answers(self) -> bool:
        answer = asyncio.ensure_future(self._beat())
        try:
            while self._silent_parts < PARTS:
                await asyncio.wait({answer}, timeout=self._timeout_s / PARTS)
                if answer.done():
                    await answer
                    self._silent_parts = 0
                    return True
                self._silent_parts += 1
            return False
        finally:
            answer.cancel()
