"""A user's own functions and classes, named in the config by dotted path."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any


def find(key: str, path: str, parameters: Sequence[str], known: Sequence[str] = ()) -> Callable[..., Any]:
    """The function or class at `path`, "package.module:name". Its module is imported, so its own errors show here. It
    may be in the current folder, where console scripts and Ray's workers would not look.

    `parameters`: what it is called with, by position; a class is called with those of its constructor. `known`: the
    built-in names that the key takes besides, for the message. Raises ValueError that names the key, the value and
    what is wrong.

    Example: find("rollout.reward", "my_rewards:length", ("prompt", "text"))
    """
    module_name, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        allowed = f"one of {', '.join(known)}, or package.module:name" if known else "package.module:name"
        raise ValueError(f"{key}={path}: must be {allowed}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}={path}: {module_name} cannot be imported: {reason}; is it on PYTHONPATH?") from error
    if name not in vars(module):
        raise ValueError(f"{key}={path}: {module_name} has no {name}")
    found = vars(module)[name]
    expected = f"({', '.join(parameters)})"
    if not callable(found):
        raise ValueError(f"{key}={path}: must be callable with {expected}, but is of type {type(found).__name__}")
    try:
        inspect.signature(found).bind(*parameters)
    except (TypeError, ValueError) as error:  # ValueError: a function of a C extension that tells no signature
        raise ValueError(f"{key}={path}: must be callable with {expected}: {error}") from error
    return found


def dotted_problems(
    key: str, path: str, known: Sequence[str], parameters: Sequence[str]
) -> list[tuple[str, object, str]]:
    """(key, value, what is wrong), if `path` is neither one of `known` nor something that `find` finds."""
    if path in known:
        return []
    try:
        find(key, path, parameters, known)
    except ValueError as error:
        return [(key, path, str(error).removeprefix(f"{key}={path}: "))]
    return []
