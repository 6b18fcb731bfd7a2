"""Reads JSON objects field by field, and refuses what nobody read."""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rollout.sessions.errors import BadRequestError

MAX_SHOWN = 80
"""Characters of a value that an error repeats."""


class Fields:
    """One JSON object of a request. Every field is taken once; null counts as a field that is not there. `end` refuses
    what was not taken: a field that is ignored by mistake would change what is sampled, and nobody would see it.

    All methods raise BadRequestError, which says where the field is, what was given and what is allowed.
    """

    def __init__(self, value: Any, where: str = ""):
        self.where = where
        if not isinstance(value, Mapping):
            raise BadRequestError(f"{where or 'the body'} = {shown(value)}: allowed is an object", param=where or None)
        self._values = {name: each for name, each in value.items() if each is not None}
        self._known: list[str] = []

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def refuse(self, name: str, value: Any, allowed: str) -> BadRequestError:
        return BadRequestError(f"{self.path(name)} = {shown(value)}: allowed is {allowed}", param=self.path(name))

    def take(self, name: str) -> Any:
        self._known.append(name)
        return self._values.pop(name, None)

    def text(self, name: str, default: str | None = None) -> str | None:
        if (value := self.take(name)) is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, value, "a string")
        return value

    def must_have_text(self, name: str) -> str:
        if (value := self.text(name)) is None:
            raise self.refuse(name, None, "a string")
        return value

    def integer(self, name: str, minimum: int, maximum: int = 2**31 - 1) -> int | None:
        value = self.take(name)
        if value is not None and (type(value) is not int or not minimum <= value <= maximum):
            raise self.refuse(name, value, f"an integer from {minimum} to {maximum}")
        return value

    def numbers(self, *names: str) -> dict[str, float]:
        """Those of the fields that are there, as finite numbers."""
        found = {name: value for name in names if (value := self.take(name)) is not None}
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
                raise self.refuse(name, value, "a finite number")
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, value, "true or false")
        return default if value is None else value

    def choice(self, name: str, allowed: Collection[str], default: str) -> str:
        value = self.text(name, default)
        if value not in allowed:
            raise self.refuse(name, value, one_of(allowed))
        assert value is not None
        return value

    def object(self, name: str) -> "Fields | None":
        value = self.take(name)
        return None if value is None else Fields(value, self.path(name))

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object whose fields are not ours to read."""
        value = self.take(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(name, value, "an object")
        return value or {}

    def items(self, name: str) -> Iterator["Fields"]:
        """The objects of a list."""
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise self.refuse(name, value, "a list of objects")
        for index, each in enumerate(value or ()):
            yield Fields(each, f"{self.path(name)}[{index}]")

    def texts(self, name: str) -> tuple[str, ...]:
        """A string, or a list of strings; an empty one would end every answer at once."""
        value = self.take(name)
        values = [value] if isinstance(value, str) else value
        if values is None:
            return ()
        if not isinstance(values, list) or not all(isinstance(each, str) and each for each in values):
            raise self.refuse(name, value, "a string or a list of strings, none of them empty")
        return tuple(values)

    def only(self, name: str, *allowed: Any) -> None:
        """A field of which we support only some values, those that change nothing."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
            raise self.refuse(name, value, "only " + " or ".join(["null", *map(shown, allowed)]))

    def ignore(self, *names: str) -> None:
        """Fields that change nothing of the answer."""
        for name in names:
            self.take(name)

    def end(self) -> None:
        for name, value in self._values.items():
            known = f"one of these fields{f' in {self.where}' if self.where else ''}: {', '.join(sorted(self._known))}"
            raise self.refuse(name, value, known)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def one_of(values: Collection[str]) -> str:
    return "one of " + ", ".join(json.dumps(value) for value in values)


def shown(value: Any) -> str:
    """As JSON in ASCII, cut off where it is long."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
