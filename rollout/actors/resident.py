"""An object that lives in a process of its own, whose methods are called from here: a call that takes too long is ended
with the process, whatever it does.

A request and an answer are pickled. They travel over a pair of sockets, each after its size.
"""

import asyncio
import contextlib
import inspect
import io
import os
import pickle
import signal
import socket
import struct
import sys
from enum import Enum
from typing import Any

from configs.runtime.deadline import within
from configs.runtime.dotted import ASIDE, import_user_module
from rollout.actors.owned import OwnedProcess, ending
from rollout.actors.packed import CarriedError

SIZE = struct.Struct("!Q")
LOOK_S = 0.05
"""The seconds between two looks at whether the process still lives. The end of its socket does not tell: a process that
it has forked and left behind holds the socket open."""


class LostProcessError(RuntimeError):
    """A call has ended the process of its object."""


class UnloadableError(RuntimeError):
    """A process cannot be started, or cannot load its object or what a call brings."""


class Outcome(Enum):
    """The meaning of an answer."""

    returned = "returned"
    raised = "raised"
    unloadable = "unloadable"


class Resident:
    """An object in a process of its own, which answers one call at a time.

    Example:
        resident = await Resident.start(pickle.dumps(Countdown(3)), "the countdown", 60.0, "start_timeout_s")
        left = await resident.call("step", (1,), "a step of the countdown", 5.0, "step_timeout_s")
        resident.end()
    """

    def __init__(self, process: OwnedProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str):
        self._process, self._reader, self._writer, self._name = process, reader, writer, name
        self._running: asyncio.Task[bytes] | None = None
        self._is_ended = False

    @classmethod
    async def start(cls, pickled: bytes, name: str, timeout_s: float, key: str) -> "Resident":
        """Start a process, which loads the object within `timeout_s`. Raises UnloadableError, which names `key` where
        that took longer."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = OwnedProcess(target=_serve, args=(theirs,), name=name, daemon=True)
                process.start()  # by the thread of the event loop: the process ends with the thread that has started it
            reader, writer = await asyncio.open_connection(sock=ours)
        except Exception as error:
            ours.close()
            raise UnloadableError(f"{name}: no process can be started: {type(error).__name__}: {error}") from error
        resident = cls(process, reader, writer, name)
        try:
            await resident._answer(pickled, name, timeout_s, key)
        except BaseException as error:
            resident.end()
            if isinstance(error, TimeoutError | LostProcessError):
                raise UnloadableError(f"{error}, when it was loaded") from None
            raise
        return resident

    @property
    def is_alive(self) -> bool:
        return not self._is_ended and self._process.is_alive()

    async def call(self, method: str, arguments: tuple[Any, ...], what: str, timeout_s: float, key: str) -> Any:
        """Return what the method of the object returns, or raise what it raises.

        A call that is cancelled goes on: the next one waits for it, within its own deadline.

        Raises:
            TimeoutError: The call took longer than `timeout_s`, which `key` sets. The process was killed.
            LostProcessError: The call has ended the process.
            UnloadableError: The process cannot load the arguments.
        """
        return await self._answer(pickle.dumps((method, arguments)), what, timeout_s, key)

    def end(self) -> None:
        """Kill the process, and what it has started in its process group."""
        self._is_ended = True
        if self._running is not None:
            self._running.cancel()
        self._writer.transport.abort()
        self._process.terminate()

    async def _answer(self, request: bytes, what: str, timeout_s: float, key: str) -> Any:
        try:
            async with within(timeout_s, key, what):
                if self._running is not None:
                    await asyncio.wait([self._running])
                running = self._running = asyncio.create_task(self._exchange(request))
                await asyncio.wait([running])
        except TimeoutError as error:
            self.end()
            raise TimeoutError(f"{error}; its process was killed") from None
        try:
            outcome, value = pickle.loads(running.result())
        except (EOFError, OSError):  # its own end of the socket is closed
            self.end()
            raise LostProcessError(f"{what} ended its process: {self._ending()}") from None
        if outcome is Outcome.returned:
            return value
        error = value.unpacked(f"the process of {self._name}")
        if outcome is Outcome.raised:
            raise error
        raise UnloadableError(f"{what} cannot be loaded in a process of its own: {type(error).__name__}: {error}")

    async def _exchange(self, request: bytes) -> bytes:
        """Return the answer. Raises EOFError and OSError where there will be none."""
        answer = asyncio.create_task(self._sent(request))
        try:
            while self._process.is_alive() and not answer.done():
                await asyncio.wait([answer], timeout=LOOK_S)
            if not answer.done():  # what it had sent before may still be on its way
                await asyncio.wait([answer], timeout=LOOK_S)
            if not answer.done():
                raise EOFError
            return answer.result()
        finally:
            answer.cancel()

    async def _sent(self, request: bytes) -> bytes:
        self._writer.write(SIZE.pack(len(request)) + request)
        await self._writer.drain()
        (size,) = SIZE.unpack(await self._reader.readexactly(SIZE.size))
        return await self._reader.readexactly(size)

    def _ending(self) -> str:
        self._process.join(1)
        code = self._process.exitcode
        return "it does not answer any more" if code is None else ending(code)


# -- what runs in the process ------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    this, loop = os.getpid(), asyncio.new_event_loop()
    resident: Any = None
    with connection, connection.makefile("rwb") as stream:
        while header := stream.read(SIZE.size):
            request = stream.read(*SIZE.unpack(header))
            try:
                loaded = _Unpickler(io.BytesIO(request)).load()
            except BaseException as error:  # a user's module may raise SystemExit, too
                answer = _failure(Outcome.unloadable, error)
            else:
                if resident is None:
                    resident, answer = loaded, pickle.dumps((Outcome.returned, None))
                else:
                    answer = _called(loop, resident, *loaded)
            if os.getpid() != this:
                os._exit(0)  # a fork that the call has made and forgotten
            stream.write(SIZE.pack(len(answer)) + answer)
            stream.flush()


def _called(loop: asyncio.AbstractEventLoop, resident: Any, method: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        value = getattr(resident, method)(*arguments)
        if inspect.isawaitable(value):
            value = loop.run_until_complete(value)
    except BaseException as error:  # SystemExit too: the call may run code that a model wrote
        return _failure(Outcome.raised, error)
    finally:
        signal.alarm(0)  # one that the call has left would hit the next
    try:
        return pickle.dumps((Outcome.returned, value))
    except Exception as error:
        problem = TypeError(f"{method} returned {type(value).__name__}, which cannot leave its process: {error}")
        return _failure(Outcome.raised, problem)


def _failure(outcome: Outcome, error: BaseException) -> bytes:
    if not isinstance(error, Exception) or isinstance(error, StopIteration):  # those end more than the call
        with contextlib.suppress(Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")
    return pickle.dumps((outcome, CarriedError.of(error)))


class _Unpickler(pickle.Unpickler):
    """Finds the modules of a user as the config does: those of the current folder first."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module.startswith(f"{ASIDE}.") and module not in sys.modules:
            sys.modules[module] = import_user_module(module.removeprefix(f"{ASIDE}."))
        return super().find_class(module, name)
