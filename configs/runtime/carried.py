"""Errors that leave the process of an actor, and arrive as they were raised."""

import inspect
import pickle
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Packed:
    """One error of a chain of causes."""

    name: str
    text: str
    notes: tuple[str, ...]
    pickled: bytes
    """Empty where it cannot be pickled."""

    @classmethod
    def of(cls, error: BaseException) -> "_Packed":
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = b""
        return cls(type(error).__qualname__, _text(error), tuple(vars(error).get("__notes__", ())), pickled)

    def unpacked(self) -> BaseException:
        """The error, or a RuntimeError with its name and text: pickle calls a constructor of several arguments with the
        wrong ones, as of errors of HTTP clients, and the module of a user's class may be missing here."""
        try:
            error = pickle.loads(self.pickled)
        except Exception:
            error = None
        if not isinstance(error, BaseException) or (type(error).__qualname__, _text(error)) != (self.name, self.text):
            error = RuntimeError(f"{self.name}: {self.text}")
        if self.notes:
            error.__notes__ = list(self.notes)
        return error


class CarriedError(Exception):
    """An error on its way to another process, with its causes and notes, which pickle and Ray alone lose.

    Example: `CarriedError.of(error)` is raised in an actor, and `as_raised` raises the error in the driver.
    """

    def __init__(self, chain: tuple[_Packed, ...], trace: str):
        """`chain`: the error, its `__cause__`, the cause of that. `trace`: the traceback, as text."""
        super().__init__(chain, trace)
        self.chain = chain
        self.trace = trace

    @classmethod
    def of(cls, error: BaseException) -> "CarriedError":
        chain: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in chain:
            chain.append(cause)
            cause = cause.__cause__
        return cls(tuple(map(_Packed.of, chain)), "".join(traceback.format_exception(error)))

    def unpacked(self, where: str) -> BaseException:
        """The error as it was raised, with the traceback as one more note."""
        first, *causes = (packed.unpacked() for packed in self.chain)
        last = first
        for cause in causes:
            last.__cause__, last = cause, cause
        first.add_note(f"on {where}:\n{self.trace}")
        return first

    def __str__(self) -> str:
        return f"{self.chain[0].name}: {self.chain[0].text}"


def carries_errors(function: F) -> F:
    """Makes a function that an actor runs raise a CarriedError in place of any error. Callers use `as_raised`."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except Exception as error:
                raise CarriedError.of(error) from None

        return cast(F, call_async)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise CarriedError.of(error) from None

    return cast(F, call)


async def as_raised(call: Awaitable[T], where: str) -> T:
    """What the call to an actor's method returns. Raises what was raised there, with the traceback as a note. An error
    of Ray, such as that of a dead actor, passes."""
    try:
        return await call
    except CarriedError as error:
        raised = error.unpacked(where)
    raise raised


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be read)"
