"""Makes a result that can be recorded of whatever a reward did: numbers are floats, texts are UTF-8, failures are
text."""

import logging
import math
import traceback
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat

from rollout.rewards.base import RewardResult

logger = logging.getLogger(__name__)
MAX_ERROR_CHARS = 2000
"""The longest text of an error: what the code of a model raises can have any length."""
LARGEST = 1e30
"""The largest number of a reward or its metrics, whatever its sign. Advantages are float32, and end the run where they
are not finite; so many rewards as an episode may have are added up."""


@dataclass(frozen=True, slots=True)
class Raised:
    """A reward raised this, or did something for which this stands."""

    error: BaseException


async def awaited(outcome: Awaitable[object]) -> object:
    """Return what the awaitable gives, or `Raised`."""
    try:
        return await outcome
    except BaseException as error:  # SystemExit too: a reward may execute code that a model wrote
        return Raised(error)


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a reward, bound to what it was called with."""

    read: int
    """The `read_checksum` of prompt and text."""
    outcome: object


def settled(where: str, outcome: object) -> RewardResult:
    """Return the result of what a reward returned, or of what it `Raised`.

    What went wrong is the result's `error`, and is logged with `where`. Nothing that a reward returns makes this raise.
    """
    if isinstance(outcome, Answer):
        return replace(settled(where, outcome.outcome), read=outcome.read)
    try:
        if isinstance(outcome, Raised):
            raise outcome.error
        result = (
            outcome if isinstance(outcome, RewardResult) else RewardResult(reward=finite_number("a reward", outcome))
        )
        return RewardResult(
            reward=finite_number("a reward", result.reward),
            accuracy=None if result.accuracy is None else finite_number("an accuracy", result.accuracy),
            answer=None if result.answer is None else _text("an answer", result.answer),
            metrics=checked_metrics(result.metrics),
            error=None if result.error is None else _error(result.error),
            read=result.read,
        )
    except BaseException as error:
        stack = "".join(traceback.format_exception(error))
        logger.warning("%s failed:\n%s", where, _recordable(stack))
        return RewardResult(reward=0.0, error=described(error))


def described(error: BaseException) -> str:
    """Return the type and the text of an error; also where its `__str__` raises, or it has characters that no file
    takes."""
    kind = type(error).__name__
    try:
        return _recordable(f"{kind}: {error}")[:MAX_ERROR_CHARS]
    except BaseException as second:
        return f"{kind}, whose text cannot be shown: its __str__ raised {type(second).__name__}"


def _error(error: object) -> str:
    return described(error) if isinstance(error, BaseException) else _text("an error", error)[:MAX_ERROR_CHARS]


def checked_metrics(metrics: Mapping[Any, object]) -> dict[str, float]:
    """Return the metrics as floats by text. Raises TypeError and ValueError, which name the metric."""
    return {
        _text("the name of a metric", name): finite_number(f"the metric {name}", value)
        for name, value in metrics.items()
    }


def finite_number(what: str, value: object) -> float:
    """Return a number as a float. Raise TypeError or ValueError with a message that begins with `what` if it is not a
    finite number, or beyond LARGEST."""
    if not isinstance(value, (float, int, SupportsFloat)):  # float() would also take a string
        raise TypeError(f"{what} must be a finite number, not {value!r:.100}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, not {number}")
    if abs(number) > LARGEST:
        raise ValueError(f"{what} must be from -{LARGEST:g} to {LARGEST:g}, not {number:g}")
    return number


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text, not {value!r:.100}")
    return _recordable(value)


def _recordable(text: str) -> str:
    """Write lone surrogates out, as `\\\\ud800`: UTF-8 has none, so that no file could be written with them."""
    return str(text).encode("utf-8", "backslashreplace").decode("utf-8")
