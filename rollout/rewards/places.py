"""The places where a reward can run: on the event loop of the agent worker, in its threads, or in processes.

Only a process can be ended when its reward holds Python's global lock (GIL).
"""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace

from configs.rollout import RewardPlace
from configs.schema import RolloutConfig
from rollout.rewards.base import Reward, RewardResult, read_checksum
from rollout.rewards.math_verify import GIVEN_UP
from rollout.rewards.outcome import Answer, Raised, awaited
from rollout.rewards.pool import NotStartedError, RewardPool
from rollout.rewards.registry import find_reward
from rollout.types import Prompt

MAX_THREADS = 256
"""Synchronous rewards of one group that run concurrently. The others wait, and their time has not begun."""
QUICK_REWARDS = ("gsm8k", "gsm8k_flexible", "dapo")
"""Rewards that look at a few hundred characters with regular expressions of linear time. They run on the event loop;
the expression of `format` is the user's and may explode."""

Responses = Sequence[tuple[Prompt, str]]


@dataclass(frozen=True, slots=True)
class Called:
    """Calls a reward that is async or known to be quick, while no other task runs. The awaitables that it returns are
    awaited concurrently."""

    reward: Reward
    timeout_s: float
    """The value of rollout.reward_timeout_s."""

    async def score(self, responses: Responses) -> list[object]:
        outcomes: list[object] = []
        waiting: dict[int, Coroutine[None, None, object]] = {}
        for index, (prompt, text) in enumerate(responses):
            read = read_checksum(prompt, text)
            try:
                outcome = self.reward(prompt, text)
            except BaseException as error:  # SystemExit too: a reward may execute code that a model wrote
                outcome = Raised(error)
            outcomes.append(Answer(read, outcome))
            if inspect.isawaitable(outcome):
                waiting[index] = _answered(read, outcome)
        calls = list(waiting.values())
        for index, outcome in zip(waiting, await _in_time(calls, self.timeout_s) if calls else [], strict=True):
            outcomes[index] = outcome
        return outcomes

    def for_group(self) -> "Called":
        return self


@dataclass(frozen=True, slots=True)
class Threads:
    """Calls a reward in threads of the agent worker, with which it can share what it holds."""

    reward: Reward
    timeout_s: float
    """The value of rollout.reward_timeout_s."""
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_THREADS))

    async def score(self, responses: Responses) -> list[object]:
        return await asyncio.gather(*(self._outcome(prompt, text) for prompt, text in responses))

    async def _outcome(self, prompt: Prompt, text: str) -> object:
        async with self.free:
            call = _in_a_thread(lambda: self.reward(prompt, text))
            [outcome] = await _in_time([_answered(read_checksum(prompt, text), call)], self.timeout_s)
            return outcome

    def for_group(self) -> "Threads":
        return Threads(self.reward, self.timeout_s)


@dataclass(frozen=True, slots=True)
class Processes:
    """Runs a reward in the processes of a pool, which all groups share."""

    pool: RewardPool
    when_lost: RewardResult | None = None
    """The result of a response that costs a process. None: the reward has failed, as it has where its process does not
    start."""
    losses: list[Exception] | None = None
    """Why processes were lost to the group so far. None: each call is a group."""

    async def score(self, responses: Responses) -> list[object]:
        losses: list[Exception] = [] if self.losses is None else self.losses
        return await asyncio.gather(*(self._outcome(prompt, text, losses) for prompt, text in responses))

    async def _outcome(self, prompt: Prompt, text: str, losses: list[Exception]) -> object:
        if self.when_lost is None:
            return await self.pool.score(prompt, text, losses)
        own_losses: list[Exception] = []
        outcome = await self.pool.score(prompt, text, own_losses)
        is_its_fault = any(not isinstance(loss, NotStartedError) for loss in own_losses)
        return self.when_lost if is_its_fault else outcome

    def for_group(self) -> "Processes":
        return replace(self, losses=[])


Place = Called | Threads | Processes
"""Runs a reward.

`score` returns one outcome per response, in order: what the reward returned, or `Raised`. It raises nothing.
`for_group` returns the same place for a group whose responses come in several calls: its limits hold for all of
them."""


def find_place(path: str, rollout: RolloutConfig) -> Place:
    """Return where a term of rollout.reward runs. Raises ValueError when it is no reward."""
    reward = find_reward(path, rollout)
    if path == "math_verify":
        pool = RewardPool(path, rollout, rollout.verify_timeout_s, "rollout.verify_timeout_s")
        return Processes(pool, when_lost=GIVEN_UP)
    in_worker = place_in_worker(reward, rollout.reward_timeout_s)
    if isinstance(in_worker, Called):
        return in_worker
    if path in QUICK_REWARDS or rollout.reward_runs_in is RewardPlace.loop:
        return Called(reward, rollout.reward_timeout_s)
    if rollout.reward_runs_in is RewardPlace.thread:
        return in_worker
    return Processes(RewardPool(path, rollout, rollout.reward_timeout_s, "rollout.reward_timeout_s"))


def place_in_worker(reward: Reward, timeout_s: float) -> Called | Threads:
    """Return where a reward runs that gets no process of its own."""
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
    """Return what the call returned, or `Raised`. A call that never returns cannot be stopped: its thread is abandoned,
    and as a daemon it does not keep the process alive, as a thread of an executor would."""
    loop, ended, outcomes = asyncio.get_running_loop(), asyncio.Event(), list[object]()

    def work() -> None:
        try:
            outcomes.append(call())
        except BaseException as error:
            outcomes.append(Raised(error))
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(ended.set)

    try:
        threading.Thread(target=work, name="reward", daemon=True).start()
    except RuntimeError as error:  # the system has no more threads for us
        return Raised(error)
    await ended.wait()
    [outcome] = outcomes
    return await awaited(outcome) if inspect.isawaitable(outcome) else outcome


async def _answered(read: int, outcome: Awaitable[object]) -> Answer:
    return Answer(read, await awaited(outcome))
