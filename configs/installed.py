"""Look at installed packages without importing them, which takes seconds."""

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path


def is_installed(package: str) -> bool:
    """Return whether the package can be imported."""
    return importlib.util.find_spec(package) is not None


def parsed_source(package: str, *path: str) -> Sequence[ast.stmt] | None:
    """Return the statements of a file of the package: none where it has no such file, and None without the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0], *path)
    return ast.parse(file.read_text("utf-8")).body if file.is_file() else ()
