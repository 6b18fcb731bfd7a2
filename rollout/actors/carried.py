"""Errors that leave the process of an actor, and arrive as they were raised."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import RayActorError

from rollout.actors.packed import CarriedError

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@contextmanager
def carried_errors() -> Iterator[None]:
    """Raise a CarriedError in place of any error of the block, which an actor runs. Callers use `as_raised`."""
    try:
        yield
    except Exception as error:
        raise CarriedError.of(error) from None


def carries_errors(function: F) -> F:
    """Run all of a function, plain or async, in `carried_errors`."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with carried_errors():
                return await function(*args, **kwargs)

        return cast(F, call_async)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with carried_errors():
            return function(*args, **kwargs)

    return cast(F, call)


async def as_raised(
    call: Awaitable[T],
    where: str,
    *,
    ends_with_us: bool = False,
    died: Callable[[RayActorError], Exception] | None = None,
) -> T:
    """Return what the call to an actor's method returns. Raise what was raised there, with the traceback as a note.

    Args:
        ends_with_us: cancelling the wait also ends the work in the actor, which Ray alone does not do.
        died: makes the error to raise when this actor has died. By default Ray's own is raised. The death of another
            actor, which the method called, is an error like any other.
    """
    try:
        return await call
    except CarriedError as error:
        raised = error.unpacked(where)
    except RayActorError as error:
        if died is None:
            raise
        raise died(error) from error
    except asyncio.CancelledError:
        if ends_with_us:
            ray.cancel(cast(Any, call))
        raise
    raise raised  # outside of the handler: the CarriedError would be its context


def get_as_raised(call: Any, where: str) -> Any:
    """Do as `as_raised` for a caller that is no coroutine: block until the call has returned."""
    try:
        return ray.get(call)
    except CarriedError as error:
        raised = error.unpacked(where)
    raise raised


async def check(name: str, question: Awaitable[object], timeout_s: float, key: str) -> str | None:
    """Return a sentence about an actor that has died, or that does not answer the question within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await question
    except RayActorError as error:
        logger.warning("%s died", name, exc_info=error)
        return f"{name} died"
    except TimeoutError:
        return f"{name} does not answer for {key}={timeout_s:g}"
    return None
