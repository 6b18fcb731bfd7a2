"""What a check of the config finds."""

from collections.abc import Iterator, Sequence
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


def null_bytes(config: Config) -> Iterator[Problem]:
    """Texts that no file, address or process can be called by."""
    sections = [("", config), *((f"{field.name}.", getattr(config, field.name)) for field in fields(config))]
    for prefix, section in sections:
        for field in fields(section) if is_dataclass(section) else ():
            if isinstance(value := getattr(section, field.name), str) and "\0" in value:
                yield Problem(f"{prefix}{field.name}", "must not have a null byte", repr(value))


def dotted_problems(key: str, path: str, known: Sequence[str], parameters: Sequence[str]) -> Iterator[Problem]:
    """A problem if `path` is neither one of the built-in names `known` nor something that `find` finds."""
    if path not in known:
        try:
            find(key, path, parameters, known)
        except ValueError as error:
            yield Problem(key, str(error).removeprefix(f"{key}={path}: "), path)
