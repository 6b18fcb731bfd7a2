"""Loads a user's own function or class, which the config names as `package.module:name`."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any


def find(
    key: str, path: str, parameters: Sequence[str], known: Sequence[str] = (), named: Collection[str] = ()
) -> Callable[..., Any]:
    """Returns the function or class of `path`, which is called with `parameters` by position, and with those `named` by
    name. `key` accepts the names `known`, too. ValueError names the key, the value and what is wrong, an error of the
    module itself included.

    Example: find("rollout.reward", "my_rewards:length", ("prompt", "text"))
    """
    module_name, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        allowed = f"one of {', '.join(known)}, or package.module:name" if known else "package.module:name"
        raise ValueError(f"{key}={path}: must be {allowed}")
    try:
        module = import_user_module(module_name)
    except (Exception, SystemExit) as error:  # a module that exits would end the command, maybe with exit code 0
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}={path}: {module_name} cannot be imported: {reason}; is it on PYTHONPATH?") from error
    if name not in vars(module):
        raise ValueError(f"{key}={path}: {module_name} has no {name}")
    found = vars(module)[name]
    expected = f"({', '.join([*parameters, *(f'{name}=...' for name in named)])})"
    if not callable(found):
        raise ValueError(f"{key}={path}: must be callable with {expected}, but is of type {type(found).__name__}")
    try:
        inspect.signature(found).bind(*parameters, **dict.fromkeys(named))
    except (TypeError, ValueError) as error:  # ValueError: some functions of C extensions have no signature
        raise ValueError(f"{key}={path}: must be callable with {expected}: {error}") from error
    return found


def import_user_module(name: str) -> ModuleType:
    """Imports a module that may be in the current folder, which console scripts and Ray's workers lack on sys.path. It
    is appended only for a module that is found nowhere else, so it never shadows an installed one."""
    if importlib.util.find_spec(name.partition(".")[0]) is None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)
