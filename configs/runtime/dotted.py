"""Loads a user's own function or class, which the config names as `package.module:name`."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ASIDE = "_current_folder"
"""The package below which modules of the current folder are loaded whose names are taken."""


def find(
    key: str, path: str, parameters: Sequence[str], known: Sequence[str] = (), named: Collection[str] = ()
) -> Callable[..., Any]:
    """Return the function or class of `path`, which is called with `parameters` by position, and with those `named` by
    name. `key` accepts the names `known`, too. ValueError names the key, the value and what is wrong, an error of the
    module itself included.

    Example: find("rollout.reward", "my_rewards:length", ("prompt", "text"))
    """
    target = find_callable(key, path, known)
    expected = f"({', '.join([*parameters, *(f'{name}=...' for name in named)])})"
    try:
        check_call(target, parameters, named)
    except (TypeError, ValueError) as error:  # ValueError: some functions of C extensions have no signature
        raise ValueError(f"{key}={path}: must be callable with {expected}: {error}") from error
    return target


def check_call(function: Callable[..., Any], parameters: Sequence[str], named: Collection[str] = ()) -> None:
    """Raise TypeError where `function` cannot be called with `parameters` by position and those `named` by name, or
    would take one of them for another: `score(text, n)` would be given the prompt as its text. Raise ValueError where
    its signature is not known."""
    inspect.signature(function).bind(*parameters, **dict.fromkeys(named))
    # A wrapper has the signature of what it wraps, and may call it as it likes.
    bound = inspect.signature(function, follow_wrapped=False).bind(*parameters, **dict.fromkeys(named))
    for own, given in bound.arguments.items():
        if own in parameters and given in parameters and own != given:
            raise TypeError(f"its argument '{own}' would be given the {given}")


def find_callable(key: str, path: str, known: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the function or class of `path`, whatever its parameters are. Raises ValueError as `find` does."""
    module_name, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        allowed = f"one of {', '.join(known)}, or package.module:name" if known else "package.module:name"
        raise ValueError(f"{key}={path}: must be {allowed}{suggestion(path)}")
    try:
        module = import_user_module(module_name)
    except (Exception, SystemExit) as error:  # a module that exits would end the command, maybe with exit code 0
        reason = f"{type(error).__name__}: {error}"
        hint = suggestion(path) or "; is it in the current folder, or on PYTHONPATH?"
        raise ValueError(f"{key}={path}: {module_name} cannot be imported: {reason}{hint}") from error
    if name not in vars(module):
        file = getattr(module, "__file__", None) or "a built-in module"
        raise ValueError(f"{key}={path}: {module_name} has no {name}; it was loaded from {file}")
    target = vars(module)[name]
    if not callable(target):
        raise ValueError(f"{key}={path}: must be a function or a class, but is of type {type(target).__name__}")
    return target


def suggestion(path: str) -> str:
    """Return the end of an error where a file stands in place of a module, as verl takes it, or a dot in place of the
    colon: "; did you mean my_rewards:score?". Return "" for other texts."""
    module, _, name = path.partition(":")
    if module.endswith(".py"):
        module = ".".join(Path(module.removesuffix(".py")).parts)
        name = name or "FUNCTION"
    elif not name:
        module, _, name = module.rpartition(".")
    else:
        return ""
    parts = [*module.split("."), name]
    return f"; did you mean {module}:{name}?" if all(part.isidentifier() for part in parts) else ""


def import_user_module(name: str) -> ModuleType:
    """Import a user's module. The current folder is looked up first, however the command was started: console scripts
    and Ray's workers lack it on `sys.path`, and `python -m` has it there.

    A module there is found although a package of its first name is installed or belongs to this project, such as
    `scripts.reward` or `agents`. It is then loaded from its file under a name of its own, and reaches its neighbours by
    relative imports (`from . import helpers`).
    """
    file = _file_in(Path.cwd(), name)
    top = name.partition(".")[0]
    if file is None:
        return importlib.import_module(name)
    if _is_taken(top):
        return _load_aside(name, file)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: what the project imports later must not be found there
    return importlib.import_module(name)


def find_file(name: str) -> Path | None:
    """Return the file that `import_user_module` would load, without loading it, or None."""
    if (file := _file_in(Path.cwd(), name)) is not None:
        return file
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _file_in(folder: Path, name: str) -> Path | None:
    """Return the file of a module in this folder, or None."""
    path = folder.joinpath(*name.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _is_taken(top: str) -> bool:
    """Return whether another module or package than that of the current folder goes by this name."""
    here = Path.cwd().resolve()
    module = sys.modules.get(top)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(top)
    except ValueError:  # `__main__` and the like have no spec
        return True
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    return not any(Path(place).resolve().is_relative_to(here) for place in places)


def _load_aside(name: str, file: Path) -> ModuleType:
    """Load a module of the current folder whose name is taken, its parent packages first."""
    alias = f"{ASIDE}.{name}"
    if alias in sys.modules:
        return sys.modules[alias]
    _load_package_aside(name.rpartition(".")[0])
    return _load(alias, file)


def _load_package_aside(name: str) -> None:
    """Make the package `name` of the current folder, and all above it, importable below `ASIDE`. It need not have an
    `__init__.py`."""
    for end in range(len(parts := [part for part in name.split(".") if part]) + 1):
        package = ".".join(parts[:end])
        alias = ".".join((ASIDE, *parts[:end]))
        if alias in sys.modules:
            continue
        file = _file_in(Path.cwd(), package) if package else None
        if file is not None:
            _load(alias, file)
            continue
        module = ModuleType(alias)
        module.__path__ = [str(Path.cwd().joinpath(*parts[:end]))]
        sys.modules[alias] = module


def _load(alias: str, file: Path) -> ModuleType:
    locations = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(alias, file, submodule_search_locations=locations)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module
