"""Exits of a user's coroutine, which would end the event loop and every other episode there."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar
from typing import Any

_is_contained: ContextVar[bool] = ContextVar("is_contained", default=False)


@contextlib.contextmanager
def exits_contained() -> Iterator[None]:
    """Contain the exits of all tasks that are made in the block, and of those that they make, such as the tools that an
    agent calls at once. Where such a task would raise SystemExit or KeyboardInterrupt, it raises RuntimeError: asyncio
    ends its event loop with these two, since elsewhere they end the program that the loop belongs to."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop.get_task_factory(), _Containing):
        loop.set_task_factory(_Containing(loop.get_task_factory()))
    token = _is_contained.set(True)
    try:
        yield
    finally:
        _is_contained.reset(token)


class _Containing:
    """Makes tasks as another factory does, which in the context of a user's coroutine contain their exits."""

    def __init__(self, factory: Any):
        self._factory = factory

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        if _is_contained.get() and isinstance(work, Coroutine):
            work = _Contained(work)
        if self._factory is not None:
            return self._factory(loop, work, **options)
        return asyncio.Task(work, loop=loop, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine whose exits are errors."""

    def __init__(self, work: Coroutine[Any, Any, Any]):
        self._work = work
        self.__qualname__ = getattr(work, "__qualname__", None) or type(work).__name__  # by which asyncio names a task

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("only a task runs it")

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._work.throw, *error)

    def close(self) -> None:
        self._work.close()

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return step(*arguments)
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
