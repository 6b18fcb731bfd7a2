"""What a check of the config finds."""

from collections.abc import Sequence
from typing import NamedTuple

from configs.runtime.dotted import find


class Problem(NamedTuple):
    key: str
    value: object
    allowed: str
    """What is allowed instead, or what is wrong."""


def dotted_problems(key: str, path: str, known: Sequence[str], parameters: Sequence[str]) -> list[Problem]:
    """A problem if `path` is neither one of the built-in names `known` nor something that `find` finds."""
    if path in known:
        return []
    try:
        find(key, path, parameters, known)
    except ValueError as error:
        return [Problem(key, path, str(error).removeprefix(f"{key}={path}: "))]
    return []
