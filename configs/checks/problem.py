"""Problems that the checks of a config report."""

import os.path
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from configs.runtime.dotted import find
from configs.schema import Config

LONGEST_NAME = 255
"""The longest name in bytes that the file systems of Linux and macOS allow."""


class Problem(NamedTuple):
    key: str
    allowed: str
    """The values that are allowed instead, or the reason why this one is wrong."""
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


def impossible_names(config: Config) -> Iterator[Problem]:
    """Yield texts that no file, address or process can be called by: later checks look for the files, and systems
    answer with errors of their own."""
    for key, value in values(config):
        if not isinstance(value, str):
            continue
        if "\0" in value:
            yield Problem(key, "must not have a null byte", repr(value))
        elif key.endswith(("path", "file", "files", "directory", "dir")):
            longest = max((len(name.encode(errors="replace")) for name in re.split("[/,]", value)), default=0)
            if longest > LONGEST_NAME:
                problem = f"no file or folder has a name of more than {LONGEST_NAME} bytes, and one here has {longest}"
                yield Problem(key, problem, f"{value[:40]}...")
            elif re.match(r"~[^/]", value) and os.path.expanduser(value) == value:
                yield Problem(key, f"there is no user {value[1:].partition('/')[0]} on this machine")


def dotted_problems(
    key: str, path: str, known: Sequence[str], parameters: Sequence[str], named: Collection[str] = ()
) -> Iterator[Problem]:
    """A problem if `path` is neither one of the built-in names `known` nor something that `find` finds."""
    if path not in known:
        try:
            find(key, path, parameters, known, named)
        except ValueError as error:
            yield Problem(key, str(error).removeprefix(f"{key}={path}: "), path)
