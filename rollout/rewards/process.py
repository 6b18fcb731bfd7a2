"""The process of a reward: loads it by its name, and then scores one response after the other until its owner is gone.

`processes.py` starts it and has the other end of the socket. The reward runs in the main thread, because graders set
time limits of their own with `signal.alarm`, which works nowhere else, and many are not made for several threads.
"""

import asyncio
import ctypes
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

from configs.schema import RolloutConfig
from rollout.rewards.base import Reward
from rollout.rewards.outcome import Raised, described, settled
from rollout.rewards.registry import find_reward
from rollout.types import Prompt

HEADER = struct.Struct("!Q")
"""Before each pickle: its length in bytes."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that the kernel sends when the parent dies."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a process."""

    path: str
    """A term of rollout.reward."""
    rollout: RolloutConfig
    sys_path: tuple[str, ...]
    """Where the owner finds modules."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The process has taken a response, and is to blame for what happens to it. The `RewardResult` is next."""


def frame(message: object) -> bytes:
    """Return a message as it goes through the socket. Raises what pickle raises."""
    payload = pickle.dumps(message)
    return HEADER.pack(len(payload)) + payload


def main(descriptor: int, owner: int) -> None:
    """Serve the socket `descriptor` until the process `owner` closes it or dies."""
    _die_with(owner)
    os.set_inheritable(descriptor, False)  # what a reward starts must not keep it open
    this = os.getpid()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        setup: Setup = _read(stream)
        try:
            sys.path[:] = setup.sys_path
            reward = find_reward(setup.path, setup.rollout)
        except BaseException as error:  # SystemExit too, of the user's module
            return _write(stream, described(error))
        _write(stream, None)
        while (response := _read(stream)) is not None:
            _write(stream, Begun())
            prompt, text = response
            result = settled(f"{setup.path} of prompt {prompt.ordinal}", _called(reward, prompt, text))
            if os.getpid() != this:
                os._exit(0)  # a fork that the reward has made and forgotten
            _write(stream, result)


def _called(reward: Reward, prompt: Prompt, text: str) -> object:
    try:
        outcome = reward(prompt, text)
        return asyncio.run(_awaited(outcome)) if inspect.isawaitable(outcome) else outcome
    except BaseException as error:  # SystemExit too: a reward may execute code that a model wrote
        return Raised(error)
    finally:
        signal.alarm(0)  # which the reward has left, and would hit the next one


async def _awaited(outcome: Any) -> object:
    return await outcome


def _die_with(owner: int) -> None:
    """Ask the kernel to end this process with its owner, also while a reward holds the GIL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:  # it has died before that
        os._exit(1)


def _read(stream: BufferedIOBase) -> Any:
    """The next message, None at the end."""
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(*HEADER.unpack(header))) if len(header) == HEADER.size else None


def _write(stream: BufferedIOBase, message: object) -> None:
    stream.write(frame(message))
    stream.flush()
