"""Calls rewards so that none of them can end, block or hang a run: what goes wrong becomes a `RewardResult.error`."""

import asyncio
import contextlib
import inspect
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import SupportsFloat, cast

from rollout.rewards.base import Reward, RewardResult, WeightedSum
from rollout.types import Prompt

logger = logging.getLogger(__name__)
MAX_THREADS = 256
"""Synchronous rewards of one call that run concurrently, under one deadline. Then come the next, under another."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


@dataclass(frozen=True, slots=True)
class RewardScorer:
    """Scores the responses of one agent worker, concurrently for all its groups.

    Example:
        scorer = RewardScorer(load_reward(config.rollout), config.rollout.reward_timeout_s)
        [result] = await scorer.score([(prompt, "2 + 2 = 4\\n#### 4")])
    """

    reward: Reward | WeightedSum
    timeout_s: float
    """rollout.reward_timeout_s, from the start of a reward."""

    async def score(self, responses: Sequence[tuple[Prompt, str]]) -> list[RewardResult]:
        """Score (prompt, text) pairs: one result each, in order.

        A reward that raises, takes too long or returns something other than a finite number gives a result with an
        `error`, and is logged. Async rewards run on the event loop, others in threads. The terms of a sum are scored
        concurrently, each with a deadline of its own.
        """
        if not isinstance(self.reward, WeightedSum):
            return await self._score(self.reward, responses)
        by_term = await asyncio.gather(*(self._score(term, responses) for term in self.reward.rewards))
        return [self.reward.combine(results) for results in zip(*by_term, strict=True)]

    async def _score(self, reward: Reward, responses: Sequence[tuple[Prompt, str]]) -> list[RewardResult]:
        is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
        run, at_once = (_awaited, len(responses) or 1) if is_async else (_in_a_thread, MAX_THREADS)
        calls = [partial(reward, prompt, text) for prompt, text in responses]
        outcomes: list[object] = []
        for start in range(0, len(calls), at_once):
            outcomes += await self._in_time([run(call) for call in calls[start : start + at_once]])
        return [_result(prompt, outcome) for (prompt, _), outcome in zip(responses, outcomes, strict=True)]

    async def _in_time(self, calls: Sequence[Coroutine[None, None, object]]) -> list[object]:
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            await asyncio.wait(tasks, timeout=self.timeout_s)
            return [task.result() if task.done() else self._late() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    def _late(self) -> object:
        return _Raised(TimeoutError(f"took longer than rollout.reward_timeout_s={self.timeout_s:g}"))


async def _in_a_thread(call: Call) -> object:
    """What the call returned, or `_Raised`. A call that never returns cannot be stopped: its thread is abandoned, and
    as a daemon it does not keep the process alive, as a thread of an executor would."""
    loop, ended, outcomes = asyncio.get_running_loop(), asyncio.Event(), list[object]()

    def work() -> None:
        try:
            outcomes.append(call())
        except BaseException as error:  # SystemExit too: a reward may execute code that a model wrote
            outcomes.append(_Raised(error))
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, name="reward", daemon=True).start()
    await ended.wait()
    [outcome] = outcomes
    return await _awaited(lambda: outcome) if inspect.isawaitable(outcome) else outcome


async def _awaited(call: Call) -> object:
    try:
        return await cast(Awaitable[object], call())
    except BaseException as error:
        return _Raised(error)


def _result(prompt: Prompt, outcome: object) -> RewardResult:
    """What a reward returned, as a result whose numbers are floats, or as one with an `error`."""
    try:
        if isinstance(outcome, _Raised):
            raise outcome.error
        result = outcome if isinstance(outcome, RewardResult) else RewardResult(reward=_finite("a reward", outcome))
        return replace(
            result,
            reward=_finite("a reward", result.reward),
            accuracy=None if result.accuracy is None else _finite("an accuracy", result.accuracy),
            metrics={name: _finite(f"the metric {name}", number) for name, number in result.metrics.items()},
        )
    except BaseException as error:
        logger.warning("the reward of prompt %d failed", prompt.ordinal, exc_info=error)
        return RewardResult(reward=0.0, error=f"{type(error).__name__}: {error}")


def _finite(what: str, value: object) -> float:
    if not isinstance(value, (float, int, SupportsFloat)):  # float() would also take a string
        raise TypeError(f"{what} must be a finite number, not {value!r:.100}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, not {number}")
    return number
