"""Tools and environments in processes, with rollout.tools_run_in=process: what a policy has them do can end, block or
hang no agent worker, because a process can be killed even while it holds Python's global lock (GIL).

Nothing is rebuilt there: a tool is found by the name of its function, and an environment is pickled before its `reset`.
"""

import asyncio
import contextlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import BuiltinMethodType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from configs.rollout import RolloutConfig, ToolPlace
from rollout.actors.resident import Resident
from rollout.actors.tasks import end_with_loop

KEY = "rollout.tools_run_in=process"
START_KEY = "rollout.start_timeout_s"
METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)
"""Functions that belong to an object. Those of a module of C belong to the module."""
_here: ContextVar["ToolProcesses | None"] = ContextVar("tool_processes", default=None)


class ToolProcesses:
    """The processes of an agent worker. They start when they are needed, and end with the event loop."""

    def __init__(self, rollout: RolloutConfig):
        """Use rollout.tool_processes and rollout.start_timeout_s."""
        self._free = asyncio.Semaphore(rollout.tool_processes)
        self._start_timeout_s = rollout.start_timeout_s
        self._idle: list[Resident] = []
        """Processes that have run a tool and wait for the next call."""
        self._living: set[Resident] = set()
        self._end: asyncio.Task[None] | None = None

    async def call(self, runner: bytes, arguments: tuple[Any, ...], what: str, timeout_s: float, key: str) -> Any:
        """Return what `run(*arguments)` of a pickled object returns, which holds no state. All calls have the same one.

        A call that is cancelled is ended with its process. Raises as `Resident.call` does.
        """
        async with self._free:
            process = self._idle.pop() if self._idle else None
            if process is None or not process.is_alive:
                process = await self._start(runner, what)
            is_idle = False
            try:
                value = await process.call("run", arguments, what, timeout_s, key)
                is_idle = True
                return value
            finally:
                if is_idle:
                    self._idle.append(process)
                else:
                    self._stop(process)

    async def place(self, environment: object) -> Resident:
        """Move an environment that has not begun into a process, where it stays until `leave`, and wait until one is
        free.

        Raises:
            ValueError: It cannot be pickled.
            UnloadableError: Its process cannot load it.
        """
        name = f"the environment {type(environment).__name__}"
        try:
            pickled = pickle.dumps(environment)
        except Exception as error:  # pickle raises several kinds
            raise ValueError(
                f"{KEY}: {name} cannot be sent to a process: {type(error).__name__}: {error}. Make what it holds in "
                "its reset, make its methods async, or set rollout.tools_run_in=thread"
            ) from error
        await self._free.acquire()
        try:
            if self._idle:  # it makes room: those that live are no more than those that may run
                self._stop(self._idle.pop())
            return await self._start(pickled, name)
        except BaseException:
            self._free.release()
            raise

    def close(self) -> None:
        """End all processes."""
        for process in list(self._living):
            self._stop(process)
        self._idle.clear()

    async def _start(self, pickled: bytes, name: str) -> Resident:
        if self._end is None or self._end.done():
            self._end = asyncio.create_task(end_with_loop(self.close))
        process = await Resident.start(pickled, name, self._start_timeout_s, START_KEY)
        self._living.add(process)
        return process

    def leave(self, process: Resident) -> None:
        """End the process of an environment, once: another may then begin."""
        self._stop(process)
        self._free.release()

    def _stop(self, process: Resident) -> None:
        self._living.discard(process)
        process.end()


# -- the place of a call -----------------------------------------------------------------------------------------------


def make_processes(rollout: RolloutConfig) -> ToolProcesses | None:
    """Return the processes of rollout.tools_run_in; None for threads."""
    return ToolProcesses(rollout) if rollout.tools_run_in is ToolPlace.process else None


@contextlib.contextmanager
def tools_in(processes: ToolProcesses | None) -> Iterator[None]:
    """Run the tools and environments of the block there, also those of tasks that begin in it."""
    token = _here.set(processes)
    try:
        yield
    finally:
        _here.reset(token)


def processes_here() -> ToolProcesses | None:
    """Return where plain tools and environments run; None for threads."""
    return _here.get()


def is_plain(environment: object) -> bool:
    """Return whether an environment may block: a method of it is a plain function, or it `has_plain_methods` itself, as
    one does that calls those of another."""
    methods = (getattr(environment, name, None) for name in ("reset", "step", "close"))
    return bool(getattr(environment, "has_plain_methods", None)) or any(
        method is not None and not inspect.iscoroutinefunction(method) for method in methods
    )


def check_by_name(function: Callable[..., Any]) -> None:
    """Raise ValueError for a tool that a process cannot find by the name of its function and of its module."""
    holder = function.__self__ if isinstance(function, METHODS) else None
    reason = ""
    if holder is not None and not isinstance(holder, type | ModuleType):
        reason = f"it is a method of an object, {type(holder).__name__}, which each process would have a copy of"
    else:
        try:
            pickle.dumps(function)
        except Exception as error:  # pickle raises several kinds
            reason = str(error)
    if reason:
        raise ValueError(
            f"{KEY}: the tool {function.__name__} is not found by its name in another process: {reason}. Make it a "
            "function of a module, make it async, or set rollout.tools_run_in=thread"
        )
