"""Calls rewards so that none of them can end, block or hang a run: what goes wrong becomes a `RewardResult.error`."""

import asyncio
import contextlib
import inspect
import logging
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import SupportsFloat, cast

from rollout.rewards.base import Reward, RewardResult, WeightedSum
from rollout.types import Prompt

logger = logging.getLogger(__name__)
PATIENCE_S = 0.05
"""Synchronous rewards that have not begun after this time get a thread each."""
MAX_THREADS = 256
"""Synchronous rewards of one call that run concurrently."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


class RewardScorer:
    """Scores the responses of one agent worker, concurrently for all its groups.

    Example:
        scorer = RewardScorer(load_reward(config.rollout), config.rollout.reward_timeout_s)
        [result] = await scorer.score([(prompt, "2 + 2 = 4\\n#### 4")])
    """

    def __init__(self, reward: Reward | WeightedSum, timeout_s: float):
        """`timeout_s`: rollout.reward_timeout_s, for all responses of one call together."""
        self._reward = reward
        self._timeout_s = timeout_s

    async def score(self, responses: Sequence[tuple[Prompt, str]]) -> list[RewardResult]:
        """Score (prompt, text) pairs: one result each, in order.

        A reward that raises, takes too long or returns something other than a finite number gives a result with an
        `error`, and is logged. Async rewards run on the event loop, others in threads. The terms of a sum are scored
        concurrently, each with a deadline of its own.
        """
        if not isinstance(self._reward, WeightedSum):
            return await self._score(self._reward, responses)
        by_term = await asyncio.gather(*(self._score(term, responses) for term in self._reward.rewards))
        return [self._reward.combine(results) for results in zip(*by_term, strict=True)]

    async def _score(self, reward: Reward, responses: Sequence[tuple[Prompt, str]]) -> list[RewardResult]:
        calls = [partial(reward, prompt, text) for prompt, text in responses]
        if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
            outcomes = await self._on_the_loop(calls)
        else:
            parts = [calls[start : start + MAX_THREADS] for start in range(0, len(calls), MAX_THREADS)]
            outcomes = [outcome for part in parts for outcome in await self._in_threads(part)]
        return [_result(prompt, outcome) for (prompt, _), outcome in zip(responses, outcomes, strict=True)]

    async def _on_the_loop(self, calls: Sequence[Call]) -> list[object]:
        tasks = [asyncio.create_task(_awaited(call)) for call in calls]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=self._timeout_s)
            return [task.result() if task.done() else self._late() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _in_threads(self, calls: Sequence[Call]) -> list[object]:
        """Return what each call returned, or `_Raised`.

        One thread makes call after call and wakes the event loop once at the end: a wake-up per call would cost more
        than a simple reward. After PATIENCE_S every call that still waits gets a thread of its own, so that a slow call
        delays no other. A call that never returns cannot be stopped: its thread is abandoned.
        """
        loop = asyncio.get_running_loop()
        outcomes = [self._late()] * len(calls)
        waiting, ended, all_ended = deque(enumerate(calls)), deque[int](), asyncio.Event()

        def work() -> None:
            with contextlib.suppress(IndexError, RuntimeError):  # nothing waits any more; the event loop is closed
                while True:
                    index, call = waiting.popleft()
                    outcomes[index] = _called(call, loop)
                    ended.append(index)
                    if len(ended) == len(calls):
                        loop.call_soon_threadsafe(all_ended.set)

        def start_threads(count: int) -> None:
            for _ in range(count):  # daemons: a call that never returns must not keep the process alive
                threading.Thread(target=work, name="reward", daemon=True).start()

        start_threads(1)
        patience = loop.call_later(PATIENCE_S, lambda: start_threads(len(waiting)))
        try:
            async with asyncio.timeout(self._timeout_s):
                await all_ended.wait()
        except TimeoutError:
            pass
        finally:
            patience.cancel()
            waiting.clear()
        return list(outcomes)

    def _late(self) -> object:
        return _Raised(TimeoutError(f"took longer than rollout.reward_timeout_s={self._timeout_s:g}"))


def _called(call: Call, loop: asyncio.AbstractEventLoop) -> object:
    """Make the call in a thread. Catches SystemExit too: a reward may execute code that a model wrote."""
    try:
        value = call()
        if inspect.isawaitable(value):
            return asyncio.run_coroutine_threadsafe(_awaited(lambda: value), loop).result()
        return value
    except BaseException as error:
        return _Raised(error)


async def _awaited(call: Call) -> object:
    try:
        return await cast(Awaitable[object], call())
    except BaseException as error:
        return _Raised(error)


def _result(prompt: Prompt, outcome: object) -> RewardResult:
    try:
        if isinstance(outcome, _Raised):
            raise outcome.error
        return _checked(outcome)
    except BaseException as error:
        logger.warning("the reward of prompt %d failed", prompt.ordinal, exc_info=error)
        return RewardResult(reward=0.0, error=f"{type(error).__name__}: {error}")


def _checked(value: object) -> RewardResult:
    """Convert what a reward returned to a result whose numbers are floats. Raises TypeError or ValueError."""
    result = value if isinstance(value, RewardResult) else RewardResult(reward=_finite("a reward", value))
    metrics = {name: _finite(f"the metric {name}", number) for name, number in result.metrics.items()}
    accuracy = None if result.accuracy is None else _finite("an accuracy", result.accuracy)
    return replace(result, reward=_finite("a reward", result.reward), accuracy=accuracy, metrics=metrics)


def _finite(what: str, value: object) -> float:
    if not isinstance(value, (float, int, SupportsFloat)):  # float() would also take a string
        raise TypeError(f"{what} must be a finite number, not {value!r:.100}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, not {number}")
    return number
