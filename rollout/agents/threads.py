"""Threads for code that blocks: environments and tools that are plain functions, and tokenizers."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from configs.runtime.deadline import within

T = TypeVar("T")
MAX_THREADS = 64
"""In one agent worker. A call beyond them waits for its turn."""
_free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def called(
    function: Callable[..., Any], timeout_s: float, key: str, what: str, /, *args: Any, **kwargs: Any
) -> Any:
    """Return what the function returns for these arguments: awaited on the event loop if it is async, else run in a
    thread. Raises what it raises, and TimeoutError as `in_thread` does."""
    if inspect.iscoroutinefunction(function):
        outcome = function(*args, **kwargs)
    else:
        outcome = await in_thread(lambda: function(*args, **kwargs), timeout_s, key, what)
    if not inspect.isawaitable(outcome):
        return outcome
    async with within(timeout_s, key, what):
        return await outcome


async def in_thread(call: Callable[[], T], timeout_s: float, key: str, what: str) -> T:
    """Return what the call returns, or raise what it raises; SystemExit and StopIteration as RuntimeError.

    A call that never returns cannot be stopped: its thread is abandoned and keeps its place among the `MAX_THREADS`. As
    a daemon it does not keep the process alive.

    Raises:
        TimeoutError: no thread was free for `timeout_s` seconds, or the call took longer. It names `key` and `what`.
    """
    loop = asyncio.get_running_loop()
    free = _free.setdefault(loop, asyncio.Semaphore(MAX_THREADS))
    async with within(timeout_s, key, f"waiting for one of {MAX_THREADS} threads for {what}"):
        await free.acquire()
    ended: asyncio.Future[T] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        free.release()
        if ended.done():  # it came too late
            return
        if error is None:
            ended.set_result(value)
        else:
            ended.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as raised:
            error = raised
            if not isinstance(error, Exception) or isinstance(error, StopIteration):  # those end more than the call
                error = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the event loop is closed, and nobody waits
            loop.call_soon_threadsafe(finish, value, error)

    try:
        threading.Thread(target=work, name=what, daemon=True).start()
    except RuntimeError:  # the system has no more threads for us
        free.release()
        raise
    async with within(timeout_s, key, what):
        return await ended


class OneThread:
    """Runs functions one after another, away from the event loop: tokenizers and chat templates take milliseconds."""

    def __init__(self, name: str):
        self._executor = ThreadPoolExecutor(1, name)

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
