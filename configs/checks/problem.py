"""What a check of the config finds."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from configs.runtime.dotted import find
from configs.schema import Config


class Problem(NamedTuple):
    key: str
    allowed: str
    """What is allowed instead, or what is wrong."""
    shown: str = ""
    """The value, where it is not shown as the config has it."""

    def line(self, config: Config) -> str:
        value = self.shown or attrgetter(self.key)(config)
        return f"{self.key}={value.value if isinstance(value, Enum) else value}: {self.allowed}"


def values(section: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every key of a config or a section of it, in full, with its value. A dict is one value."""
    for field in fields(section):  # pyright: ignore[reportArgumentType]
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from values(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def null_bytes(config: Config) -> Iterator[Problem]:
    """Texts that no file, address or process can be called by."""
    for key, value in values(config):
        if isinstance(value, str) and "\0" in value:
            yield Problem(key, "must not have a null byte", repr(value))


def dotted_problems(
    key: str, path: str, known: Sequence[str], parameters: Sequence[str], named: Collection[str] = ()
) -> Iterator[Problem]:
    """A problem if `path` is neither one of the built-in names `known` nor something that `find` finds."""
    if path not in known:
        try:
            find(key, path, parameters, known, named)
        except ValueError as error:
            yield Problem(key, str(error).removeprefix(f"{key}={path}: "), path)
