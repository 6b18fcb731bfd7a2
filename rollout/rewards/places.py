"""Where a reward runs within the agent worker: awaited on its event loop, called there, or in threads.

None of these can end a reward that holds Python's global lock (GIL). `processes.py` can.
"""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rollout.rewards.base import Reward
from rollout.rewards.outcome import Raised
from rollout.types import Prompt

MAX_THREADS = 256
"""Synchronous rewards of one call that run concurrently, under one deadline. Then come the next, under another."""

Responses = Sequence[tuple[Prompt, str]]


class Place(Protocol):
    """Runs a reward."""

    async def score(self, responses: Responses) -> list[object]:
        """Return one outcome per response, in order: what the reward returned, or `Raised`. Raises nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Called:
    """Calls a reward that is async, or known to be quick, as those of this project are: no other task runs meanwhile.
    Where it returns awaitables, all are awaited concurrently."""

    reward: Reward
    timeout_s: float
    """rollout.reward_timeout_s."""

    async def score(self, responses: Responses) -> list[object]:
        outcomes: list[object] = []
        for prompt, text in responses:
            try:
                outcomes.append(self.reward(prompt, text))
            except BaseException as error:  # SystemExit too: a reward may execute code that a model wrote
                outcomes.append(Raised(error))
        waiting = {index: outcome for index, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)}
        calls = [_awaited(outcome) for outcome in waiting.values()]
        for index, outcome in zip(waiting, await _in_time(calls, self.timeout_s) if calls else [], strict=True):
            outcomes[index] = outcome
        return outcomes


@dataclass(frozen=True, slots=True)
class Threads:
    """Calls a reward in threads of the agent worker, with which it can share what it holds."""

    reward: Reward
    timeout_s: float
    """rollout.reward_timeout_s."""

    async def score(self, responses: Responses) -> list[object]:
        calls = [partial(self.reward, prompt, text) for prompt, text in responses]
        outcomes: list[object] = []
        for start in range(0, len(calls), MAX_THREADS):
            some = [_in_a_thread(call) for call in calls[start : start + MAX_THREADS]]
            outcomes += await _in_time(some, self.timeout_s)
        return outcomes


def place_in_worker(reward: Reward, timeout_s: float) -> Place:
    """Where a reward runs that gets no process of its own."""
    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    return Called(reward, timeout_s) if is_async else Threads(reward, timeout_s)


async def _in_time(calls: Sequence[Coroutine[None, None, object]], timeout_s: float) -> list[object]:
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.wait(tasks, timeout=timeout_s)
        late = Raised(TimeoutError(f"took longer than rollout.reward_timeout_s={timeout_s:g}"))
        return [task.result() if task.done() else late for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _in_a_thread(call: Callable[[], object]) -> object:
    """What the call returned, or `Raised`. A call that never returns cannot be stopped: its thread is abandoned, and
    as a daemon it does not keep the process alive, as a thread of an executor would."""
    loop, ended, outcomes = asyncio.get_running_loop(), asyncio.Event(), list[object]()

    def work() -> None:
        try:
            outcomes.append(call())
        except BaseException as error:
            outcomes.append(Raised(error))
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, name="reward", daemon=True).start()
    await ended.wait()
    [outcome] = outcomes
    return await _awaited(outcome) if inspect.isawaitable(outcome) else outcome


async def _awaited(outcome: Awaitable[object]) -> object:
    try:
        return await outcome
    except BaseException as error:
        return Raised(error)
