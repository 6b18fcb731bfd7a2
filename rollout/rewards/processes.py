"""Rewards in processes of their own: one that hangs is killed, even while it holds Python's global lock (GIL)."""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from asyncio.subprocess import DEVNULL, Process
from dataclasses import dataclass

from configs.runtime.deadline import within
from configs.runtime.environment import PYTHON_PATH
from configs.schema import RolloutConfig
from rollout.rewards.base import RewardResult
from rollout.rewards.outcome import Raised
from rollout.rewards.places import Place, Responses
from rollout.rewards.process import HEADER, Begun, Setup, frame
from rollout.types import Prompt

MAX_LOST = 3
"""Processes that one group may cost. What is unscored then has failed too, so that a reward that always hangs ends the
run after minutes, however large its groups are."""
EXIT_S = 5.0
"""So long a process that has closed its socket may take to end."""
READ_S = 1.0
"""So long what a process wrote before its end may take to be read."""
RUN = "from rollout.rewards.process import main; main({descriptor}, {owner})"


class RewardProcessError(RuntimeError):
    """A reward has ended its process, or cannot be loaded in one."""


class RewardProcesses:
    """Runs a reward, named by its path, in processes that are started when all others are busy. Each scores one
    response at a time, so that who loses a process is known.

    Example:
        processes = RewardProcesses("my_rewards:near_the_end", config.rollout)
        [outcome] = await processes.score([(prompt, "2 + 2 = 4\\n#### 4")])
    """

    def __init__(self, path: str, rollout: RolloutConfig):
        """`path`: a term of rollout.reward."""
        self._path, self._rollout = path, rollout
        self._idle: list[_Process] = []
        self._free = asyncio.Semaphore(rollout.reward_processes)

    async def score(self, responses: Responses) -> list[object]:
        """Return one outcome per response, in order: a `RewardResult`, or what stands for it in `Raised`."""
        return await self.of_group().score(responses)

    def of_group(self) -> Place:
        return _OfGroup(self, [])

    async def outcome(self, response: tuple[Prompt, str], losses: list[Exception]) -> object:
        """`losses`: why processes of this group were lost so far, which is added to."""
        async with self._free:
            if len(losses) >= MAX_LOST:
                text = f"not scored: {MAX_LOST} processes were lost to its group, the last because it {losses[-1]}"
                return Raised(RewardProcessError(text))
            try:
                message = frame(response)
            except Exception as failure:  # of pickling what a prompt holds
                return Raised(failure)
            try:
                return await self._run(message)
            except Exception as loss:
                losses.append(loss)
                return Raised(loss)

    async def _run(self, message: bytes) -> RewardResult:
        """Raises what costs a process: RewardProcessError, TimeoutError, and what starting one raises."""
        while True:
            was_idle = bool(self._idle)
            process = self._idle.pop() if was_idle else await _start(self._path, self._rollout)
            is_kept = False
            try:
                if (result := await process.score(message, self._rollout.reward_timeout_s)) is not None:
                    is_kept = True
                    self._idle.append(process)
                    return result
                if not was_idle:  # else it was ended while nobody used it
                    raise RewardProcessError(f"ended its process: {await process.ending()}")
            finally:
                if not is_kept:
                    process.kill()


@dataclass(frozen=True, slots=True)
class _OfGroup:
    processes: RewardProcesses
    losses: list[Exception]

    async def score(self, responses: Responses) -> list[object]:
        return await asyncio.gather(*(self.processes.outcome(response, self.losses) for response in responses))

    def of_group(self) -> Place:
        return self


@dataclass(frozen=True, slots=True)
class _Process:
    process: Process
    reader: StreamReader
    writer: StreamWriter
    end: "asyncio.Task[None]"

    async def score(self, message: bytes, timeout_s: float) -> RewardResult | None:
        """None: the process has ended before it took the message. Raises RewardProcessError and TimeoutError."""
        has_begun = False
        try:
            async with within(timeout_s, "rollout.reward_timeout_s", "the reward"):
                self.writer.write(message)
                has_begun = isinstance(await self.read(), Begun)
                result = await self.read()
                assert isinstance(result, RewardResult)
                return result
        except TimeoutError:
            raise TimeoutError(f"took longer than rollout.reward_timeout_s={timeout_s:g}") from None
        except (OSError, IncompleteReadError):
            if not has_begun:
                return None
            raise RewardProcessError(f"ended its process: {await self.ending()}") from None

    async def read(self) -> object:
        [size] = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        return pickle.loads(await self.reader.readexactly(size))

    async def ending(self) -> str:
        """Say how the process, which has closed its socket, has ended."""
        try:
            async with asyncio.timeout(EXIT_S):
                code = await self.process.wait()
        except TimeoutError:
            return "it closed its socket"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Also what the reward has started, unless that has left the process group."""
        self.writer.close()
        if self.process.returncode is None:
            _kill_group(self.process)


async def _start(path: str, rollout: RolloutConfig) -> _Process:
    """Start a process, and wait until it has loaded the reward. Raises RewardProcessError, and TimeoutError after
    rollout.start_timeout_s."""
    mine, its = socket.socketpair()
    with its:
        reader, writer = await asyncio.open_connection(sock=mine)
        try:
            process = await _executed(its.fileno())
        except BaseException:
            writer.close()
            raise
    started = _Process(process, reader, writer, asyncio.create_task(_watch(process, writer)))
    problem: object = "it was cancelled"
    try:
        async with within(
            rollout.start_timeout_s, "rollout.start_timeout_s", f"starting a process of the reward {path}"
        ):
            writer.write(frame(Setup(path, rollout, tuple(sys.path))))
            problem = await started.read()
    except (OSError, IncompleteReadError):
        problem = f"its process ended: {await started.ending()}"
    finally:
        if problem is not None:
            started.kill()
    if problem is not None:
        raise RewardProcessError(f"cannot be loaded: {problem}")
    return started


async def _executed(descriptor: int) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # the current folder must not shadow modules
        "-c",
        RUN.format(descriptor=descriptor, owner=os.getpid()),
        stdin=DEVNULL,
        pass_fds=[descriptor],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        start_new_session=True,  # a group of its own, which can be killed as one
    )


async def _watch(process: Process, writer: StreamWriter) -> None:
    """When the process has ended, or the event loop does, end what the reward has started. What escapes that may still
    hold the socket open, so that only this tells of the end."""
    try:
        await process.wait()
    finally:
        _kill_group(process)
        await process.wait()
    await asyncio.sleep(READ_S)
    writer.close()


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
