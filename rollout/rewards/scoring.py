"""Calls rewards so that none of them can kill, block or hang a run: what goes wrong becomes a `RewardResult.error`."""

import asyncio
import contextlib
import inspect
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import SupportsFloat, cast

from rollout.rewards.base import Reward, RewardResult
from rollout.rewards.threads import RewardThreads
from rollout.rewards.weighted_sum import WeightedSum
from rollout.types import Prompt

logger = logging.getLogger(__name__)
PATIENCE_S = 0.05
"""Rewards that have not begun after so long get a thread each."""
MAX_THREADS = 256
"""Synchronous rewards that run at once, per call of `score`."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


async def score(
    reward: Reward | WeightedSum, responses: Sequence[tuple[Prompt, str]], timeout_s: float, threads: RewardThreads
) -> list[RewardResult]:
    """One result per (prompt, text), in order. A reward that raises, takes longer than `timeout_s` (config key
    rollout.reward_timeout_s) or gives something that is no finite number has an `error`, and is logged.

    An async reward runs on the event loop, all responses side by side. Any other runs in `threads`, see `_in_threads`.
    The terms of a sum run side by side.
    """
    if isinstance(reward, WeightedSum):
        by_term = await asyncio.gather(*(score(term, responses, timeout_s, threads) for term in reward.rewards))
        return [reward.combine(results) for results in zip(*by_term, strict=True)]
    calls = [partial(reward, prompt, text) for prompt, text in responses]
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        outcomes = await _on_the_loop(calls, timeout_s)
    else:
        parts = [calls[start : start + MAX_THREADS] for start in range(0, len(calls), MAX_THREADS)]
        outcomes = [outcome for part in parts for outcome in await _in_threads(part, timeout_s, threads)]
    return [_result(prompt, outcome) for (prompt, _), outcome in zip(responses, outcomes, strict=True)]


async def _on_the_loop(calls: Sequence[Call], timeout_s: float) -> list[object]:
    tasks = [asyncio.create_task(_awaited(call)) for call in calls]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        return [task.result() if task.done() else _late(timeout_s) for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _in_threads(calls: Sequence[Call], timeout_s: float, threads: RewardThreads) -> list[object]:
    """What each call returns, or `_Raised`. One thread takes call after call and wakes the loop once, since that would
    cost more than a simple reward itself; after PATIENCE_S there is one more for every call that still waits, so that a
    slow call delays no other. A call cannot be stopped: the thread of one that never ends is left behind."""
    loop = asyncio.get_running_loop()
    outcomes = [_late(timeout_s)] * len(calls)
    waiting, ended, all_ended = deque(enumerate(calls)), deque[int](), asyncio.Event()

    def work() -> None:
        with contextlib.suppress(IndexError, RuntimeError):  # nothing waits any more; the event loop has been closed
            while True:
                index, call = waiting.popleft()
                outcomes[index] = _called(call, loop)
                ended.append(index)
                if len(ended) == len(calls):
                    loop.call_soon_threadsafe(all_ended.set)

    def work_in_threads(count: int) -> None:
        for _ in range(count):
            threads.run(work)

    work_in_threads(1)
    patience = loop.call_later(PATIENCE_S, lambda: work_in_threads(len(waiting)))
    try:
        async with asyncio.timeout(timeout_s):
            await all_ended.wait()
    except TimeoutError:
        pass
    finally:
        patience.cancel()
        waiting.clear()
    return list(outcomes)


def _called(call: Call, loop: asyncio.AbstractEventLoop) -> object:
    """In a thread. Catches SystemExit too: a reward may run code that it was given."""
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


def _late(timeout_s: float) -> object:
    return _Raised(TimeoutError(f"took longer than rollout.reward_timeout_s={timeout_s:g}"))


def _result(prompt: Prompt, outcome: object) -> RewardResult:
    try:
        if isinstance(outcome, _Raised):
            raise outcome.error
        return checked(outcome)
    except BaseException as error:
        logger.warning("the reward of prompt %d failed", prompt.ordinal, exc_info=error)
        return RewardResult(reward=0.0, error=f"{type(error).__name__}: {error}")


def checked(value: object) -> RewardResult:
    """A reward's answer as a result whose numbers are floats. Raises TypeError or ValueError."""
    result = value if isinstance(value, RewardResult) else RewardResult(reward=_finite("a reward", value))
    metrics = {name: _finite(f"the metric {name}", number) for name, number in result.metrics.items()}
    accuracy = None if result.accuracy is None else _finite("an accuracy", result.accuracy)
    return replace(result, reward=_finite("a reward", result.reward), accuracy=accuracy, metrics=metrics)


def _finite(what: str, value: object) -> float:
    if not isinstance(value, (float, int, SupportsFloat)):  # a string is none, though float() takes it
        raise TypeError(f"{what} must be a finite number, not {value!r:.100}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, not {number}")
    return number
