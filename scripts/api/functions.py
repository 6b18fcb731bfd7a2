"""Functions and classes of a user's script or notebook, on their way to the processes of a run.

The rule: what a module has that new processes find is passed on by its name, `package.module:name`, as the config takes
it. They look in the current folder, in the folder of the script, on PYTHONPATH and in what is installed. Everything
else is pickled with what it refers to, into a module of the current folder, `runs/functions/NAME_DIGEST.py`, which the
config names as any other: functions of the script itself (`__main__`), of a notebook's cells, lambdas and closures.
"""

import base64
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import cloudpickle

from configs.runtime.dotted import check_call
from configs.runtime.environment import REPO_ROOT
from configs.validate import ConfigError
from trainer.tracking.sinks import write_atomically

FOLDER = Path("runs", "functions")
"""The folder of the modules with pickled functions, in the current folder."""
LARGEST = 16 * 2**20
"""The most bytes of a pickled function: more is data, which belongs into a file that the function reads."""
LINE = 100
T = TypeVar("T", bound=Callable[..., Any])


def reward(function: T) -> T:
    """Mark a function of (prompt, text) as a reward, and check that it can be called so. It stays as it is.

    Example:
        @slipstream.reward
        def right(prompt, text):
            return float(prompt.ground_truth in text)
    """
    _check_call("reward", function, "prompt", "text")
    with suppress(ValueError):  # no signature is known
        if {"prompts", "completions"} & set(inspect.signature(function).parameters):
            here = "here a reward scores one response: (prompt, text), where prompt.ground_truth is the answer"
            raise TypeError(f"reward {_name(function)}: takes lists, as TRL's rewards do; {here}")
    return function


def tool(function: T) -> T:
    """Mark a function as a tool, and check that its type annotations and docstring describe it. It stays as it is.

    Raises ValueError for a function that no schema describes.
    """
    from rollout.agents.tools import Tool

    Tool.of(function)
    return function


def environment(maker: T) -> T:
    """Mark a class, or a function of (prompt), as the maker of the environment of an episode. It stays as it is."""
    _check_call("environment", maker, "prompt")
    made: object = maker
    if isinstance(made, type) and getattr(made, "step", None) is None:
        raise TypeError(f"environment {made.__name__}: has no step(turn)")
    return maker


def _check_call(what: str, function: Callable[..., Any], *parameters: str) -> None:
    try:
        check_call(function, parameters)
    except ValueError:  # no signature is known, as of some functions of C extensions: the run's own check tells
        return
    except TypeError as error:
        raise TypeError(f"{what} {_name(function)}: must be callable with ({', '.join(parameters)}): {error}") from None


def refuse(key: str, check: Callable[[T], T], function: T) -> None:
    """Raise ConfigError for what `reward`, `tool` or `environment` finds wrong with a function that is not marked.

    Example: refuse("rollout.reward", reward, lambda text: 1.0)
    """
    try:
        check(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}={_shown(function)}: {error}") from error


# -- there -------------------------------------------------------------------------------------------------------------


def reference(key: str, function: Callable[..., Any]) -> str:
    """Return the `package.module:name` by which every process of a run finds the function.

    Raises:
        ConfigError: It cannot be pickled. The text names `key` and the function.
    """
    if (name := _importable(function)) is not None:
        return name
    pickled, name = _pickled(key, function), _name(function)
    file = FOLDER / f"{name}_{sha256(pickled).hexdigest()[:12]}.py"
    try:
        write_atomically(file, _module(function, name, pickled).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ConfigError(f"{key}={_shown(function)}: {file} cannot be written: {error.strerror}") from error
    return f"{'.'.join(file.with_suffix('').parts)}:{name}"


def python_path() -> str:
    """Return PYTHONPATH for the processes of a run: the user's own, after the folder of the script."""
    entries = [str(REPO_ROOT), *map(str, script_folder()), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, entries))


def script_folder() -> list[Path]:
    """Return the folder of the script that runs here, if one does: not for a module (`python -m`) or a notebook."""
    main = vars(sys.modules["__main__"])
    file = main.get("__file__")
    return [Path(file).resolve().parent] if file is not None and main.get("__spec__") is None else []


def _importable(function: Callable[..., Any]) -> str | None:
    """Return `module:name` where a new process finds this very object by it."""
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    module = sys.modules.get(module_name or "")
    if module_name is None or module is None or module_name == "__main__":
        return None
    if name is None or vars(module).get(name) is not function:
        return None
    file = vars(module).get("__file__")
    if file is None or not _is_found(module_name, Path(file).resolve()):
        return None
    return f"{module_name}:{name}"


def _is_found(module: str, file: Path) -> bool:
    """Return whether new processes look for the module where it lies."""
    installed = [Path(entry) for entry in sys.path if Path(entry).is_relative_to(sys.prefix)]
    own = map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    for folder in (Path.cwd(), REPO_ROOT, *script_folder(), *own, *installed):
        path = folder.resolve().joinpath(*module.split("."))
        if file in (path.with_suffix(".py"), path / "__init__.py"):
            return True
    return False


def _pickled(key: str, function: Callable[..., Any]) -> bytes:
    hidden = _hidden_module(function)
    if hidden is not None:
        cloudpickle.register_pickle_by_value(hidden)
    try:
        pickled = cloudpickle.dumps(function)
    except Exception as error:  # every object raises what it likes
        raise ConfigError(
            f"{key}={_shown(function)}: cannot be sent to the processes of a run: {type(error).__name__}: {error}. "
            "Make what it holds inside of it, or put it into a module of the current folder"
        ) from error
    finally:
        if hidden is not None:
            cloudpickle.unregister_pickle_by_value(hidden)
    if len(pickled) > LARGEST:
        raise ConfigError(
            f"{key}={_shown(function)}: has {len(pickled) / 2**20:.0f} MiB with what it refers to, and "
            f"{LARGEST // 2**20} are allowed: let it read large data from a file"
        )
    return pickled


def _hidden_module(function: Callable[..., Any]) -> ModuleType | None:
    """Return the module of a function or class that new processes do not find: what is in it travels, not its name."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if (
        module is None
        or module.__name__ == "__main__"
        or not (inspect.isfunction(function) or isinstance(function, type))
    ):
        return None
    file = vars(module).get("__file__")
    is_found = (
        file is None or Path(file).is_relative_to(sys.base_prefix) or _is_found(module.__name__, Path(file).resolve())
    )
    return None if is_found else module


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", None)
    return name if name is not None and name.isidentifier() else "function"


def _shown(function: Callable[..., Any]) -> str:
    name, module = (getattr(function, f"__{which}__", None) for which in ("qualname", "module"))
    return repr(function)[:100] if name is None else f"<{name} of {module}>"


# -- the module of a pickled function ----------------------------------------------------------------------------------


def _module(function: Callable[..., Any], name: str, pickled: bytes) -> str:
    """Return the text of the module. It shows the source, for people."""
    packed = base64.b64encode(pickled).decode()
    lines = [packed[start : start + LINE] for start in range(0, len(packed), LINE)]
    return "\n".join(
        [
            f'"""Loads {_name(function)}, which was pickled by `slipstream` (docs/python.md)."""',
            "",
            "from scripts.api.functions import restored",
            "",
            *(f"# {line}".rstrip() for line in _source(function)),
            f"{name} = restored(",
            *(f'    "{line}"' for line in lines[:-1]),
            f'    "{lines[-1]}",',
            "    __name__,",
            ")",
            "",
        ]
    )


def _source(function: Callable[..., Any]) -> list[str]:
    try:
        return inspect.getsource(function).splitlines()
    except (OSError, TypeError):
        return ["Its source is not known."]


def restored(packed: str, module: str) -> Any:
    """Return the object. Functions and classes take the module as their own, by which other processes of a worker, such
    as those of tools, find them."""
    loaded = pickle.loads(base64.b64decode(packed))
    if inspect.isfunction(loaded) or isinstance(loaded, type):
        loaded.__module__, loaded.__qualname__ = module, _name(loaded)
    return loaded
