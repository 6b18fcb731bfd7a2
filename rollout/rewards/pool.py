"""Rewards in processes of their own: one that hangs is killed, even while it holds Python's global lock (GIL).

The pool is pebble's. It knows which process has taken which response, ends a process whose response takes too long and
replaces it. This module adds what rewards need besides:

- The reward is loaded by its name in each process, so that nothing is pickled but prompts, texts and results.
- It runs in the main thread, one response at a time. Graders set time limits of their own with `signal.alarm`, which
  works nowhere else, and many are not made for several threads.
- A process leads a process group, which is killed as one: a reward may run a model's code with `subprocess`.
- No process outlives its owner (on Linux), whatever the reward does.
"""

import asyncio
import inspect
import os
import pickle
import signal
from multiprocessing.context import SpawnContext

from pebble import ProcessExpired, ProcessPool

from configs.schema import RolloutConfig
from rollout.actors.owned import OwnedProcess, ending, kill_group
from rollout.actors.tasks import end_with_loop
from rollout.rewards.base import Reward, RewardResult, read_checksum
from rollout.rewards.outcome import Answer, Raised, awaited, described, settled
from rollout.rewards.registry import find_reward
from rollout.types import Prompt

MAX_LOST = 3
"""Processes that one group may cost. The rewards that are then missing have failed too, so that a reward that always
hangs ends the run after minutes, however large its groups are."""
EXIT_0 = 256
"""The exit code that a process reports in place of 0, and that no process has. The processes of the pool never end by
themselves, but pebble looks for the response of an ended one only where the code is not 0: after `os._exit(0)` in a
reward it would wait until the deadline."""


class RewardProcessError(RuntimeError):
    """A reward has ended its process, or cannot be loaded in one."""


class NotStartedError(RewardProcessError):
    """The process of a reward cannot load it, or has not come to a response: that is no fault of the response."""


class RewardPool:
    """The processes of one reward. All start with the first response, and end with the event loop.

    Example:
        pool = RewardPool("my_rewards:near_the_end", config.rollout, 60.0, "rollout.reward_timeout_s")
        result = await pool.score(prompt, "2 + 2 = 4\\n#### 4", losses=[])
    """

    def __init__(self, path: str, rollout: RolloutConfig, timeout_s: float, key: str):
        """`path`: a term of rollout.reward. `timeout_s`: the deadline of one response, which `key` sets."""
        self._path, self._rollout, self._timeout_s, self._key = path, rollout, timeout_s, key
        # A response is handed over only when a process is free: its deadline is then no longer than its own work.
        self._free = asyncio.Semaphore(rollout.reward_processes)
        self._pool: ProcessPool | None = None
        self._end: asyncio.Task[None] | None = None

    async def score(self, prompt: Prompt, text: str, losses: list[Exception]) -> RewardResult | Raised:
        """Return the result of one response. A process that is lost is added to `losses`, those of the group so far."""
        async with self._free:
            if len(losses) >= MAX_LOST:
                why = f"not scored: {MAX_LOST} processes were lost to its group, the last because it {losses[-1]}"
                return Raised(RewardProcessError(why))
            try:
                # Pickled here, because pebble's scheduler would die of an error that pickle does not document.
                response = pickle.dumps((prompt, text))
            except Exception as error:
                return Raised(error)
            try:
                return await self._result(response)
            except (RewardProcessError, TimeoutError) as loss:
                losses.append(loss)
                return Raised(loss)

    async def _result(self, response: bytes) -> RewardResult:
        """Raise RewardProcessError or TimeoutError for a response that costs a process."""
        for _ in range(MAX_LOST):
            try:
                result = await self._in_process(response)
            except ProcessExpired as death:
                if death.pid is not None:
                    kill_group(death.pid)  # what the reward had started
                code = 0 if death.exitcode == EXIT_0 else death.exitcode
                raise RewardProcessError(f"ended its process: {ending(code)}") from None
            except NotStartedError:
                raise
            except RuntimeError:
                continue  # pebble has given the pool up: a process died that was idle or starting, and had no response
            if isinstance(result, str):
                raise NotStartedError(f"cannot be loaded: {result}")
            return result
        raise NotStartedError("ended its process before it took a response")

    async def _in_process(self, response: bytes) -> RewardResult | str:
        pool = self._running_pool()
        answer = asyncio.wrap_future(pool.submit(_score, self._timeout_s, self._path, response))
        start_s = self._rollout.start_timeout_s
        try:
            # pebble's own deadline begins when a process has taken the response, and so does not cover its start.
            done, _ = await asyncio.wait([answer], timeout=start_s + self._timeout_s)
            if not done:
                raise NotStartedError(f"took longer than rollout.start_timeout_s={start_s:g} to start")
        finally:
            answer.cancel()  # has pebble end the process, where somebody has cancelled us
        try:
            return answer.result()
        except TimeoutError:
            raise TimeoutError(f"took longer than {self._key}={self._timeout_s:g}") from None

    def _running_pool(self) -> ProcessPool:
        if self._pool is None or not self._pool.active:
            self._stop()
            arguments = (self._path, self._rollout)
            self._pool = ProcessPool(self._rollout.reward_processes, 0, _load, arguments, _RewardContext())
        if self._end is None or self._end.done():
            self._end = asyncio.create_task(end_with_loop(self._stop))
        return self._pool

    def _stop(self) -> None:
        """End all processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()


# -- what runs in a process of the pool --------------------------------------------------------------------------------


class _RewardProcess(OwnedProcess):
    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return EXIT_0 if code == 0 else code


class _RewardContext(SpawnContext):
    Process = _RewardProcess


_loaded: dict[str, Reward | str] = {}
"""The reward of this process by its path, or why it cannot be loaded."""


def _load(path: str, rollout: RolloutConfig) -> None:
    try:
        _loaded[path] = find_reward(path, rollout)
        if path == "math_verify":
            from rollout.rewards.math_verify import prepare_process

            prepare_process()
    except BaseException as error:  # a user's module may raise SystemExit, too
        _loaded[path] = described(error)


def _score(path: str, response: bytes) -> RewardResult | str:
    """Return the result, or why the reward cannot be loaded."""
    if isinstance(reward := _loaded[path], str):
        return reward
    this = os.getpid()
    prompt, text = pickle.loads(response)
    # What a reward returns may not be picklable, and is made a result here.
    answer = Answer(read_checksum(prompt, text), _called(reward, prompt, text))
    result = settled(f"{path} of prompt {prompt.ordinal}", answer)
    if os.getpid() != this:
        os._exit(0)  # a fork that the reward has made and forgotten
    return result


def _called(reward: Reward, prompt: Prompt, text: str) -> object:
    try:
        outcome = reward(prompt, text)
        return asyncio.run(awaited(outcome)) if inspect.isawaitable(outcome) else outcome
    except BaseException as error:  # SystemExit too: a reward may execute code that a model wrote
        return Raised(error)
    finally:
        signal.alarm(0)  # one that the reward has left would hit the next response
