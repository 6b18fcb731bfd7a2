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
"""Synchronous rewards of one group that run concurrently. The others wait, and their time has not begun."""

Responses = Sequence[tuple[Prompt, str]]


class Place(Protocol):
    """Runs a reward."""

    async def score(self, responses: Responses) -> list[object]:
        """Return one outcome per response, in order: what the reward returned, or `Raised`. Raises nothing."""
        ...

    def of_group(self) -> "Place":
        """The same place for a group whose responses come in several calls: its limits hold for all of them."""
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

    def of_group(self) -> Place:
        return self


@dataclass(frozen=True, slots=True)
class Threads:
    """Calls a reward in threads of the agent worker, with which it can share what it holds."""

    reward: Reward
    timeout_s: float
    """rollout.reward_timeout_s."""

    async def score(self, responses: Responses) -> list[object]:
        return await self.of_group().score(responses)

    def of_group(self) -> Place:
        return _ThreadsOfGroup(self, asyncio.Semaphore(MAX_THREADS))


@dataclass(frozen=True, slots=True)
class _ThreadsOfGroup:
    threads: Threads
    free: asyncio.Semaphore

    async def score(self, responses: Responses) -> list[object]:
        return await asyncio.gather(*(self._outcome(prompt, text) for prompt, text in responses))

    async def _outcome(self, prompt: Prompt, text: str) -> object:
        async with self.free:
            call = _in_a_thread(partial(self.threads.reward, prompt, text))
            [outcome] = await _in_time([call], self.threads.timeout_s)
            return outcome

    def of_group(self) -> Place:
        return self


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
