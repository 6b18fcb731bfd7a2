"""What a check of the config finds."""

from collections.abc import Iterator, Sequence
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
        value = attrgetter(self.key)(config)
        return f"{self.key}={self.shown or (value.value if isinstance(value, Enum) else value)}: {self.allowed}"


def dotted_problems(key: str, path: str, known: Sequence[str], parameters: Sequence[str]) -> Iterator[Problem]:
    """A problem if `path` is neither one of the built-in names `known` nor something that `find` finds."""
    if path not in known:
        try:
            find(key, path, parameters, known)
        except ValueError as error:
            yield Problem(key, str(error).removeprefix(f"{key}={path}: "), path)
