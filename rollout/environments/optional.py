"""Imports the packages of other people's environments, which nobody needs who has no such environment."""

import importlib
from types import ModuleType


def optional(module: str, package: str) -> ModuleType:
    """The module. Raises ImportError, which says how to install its package and what went wrong.

    Example: optional("skyrl_gym", "skyrl-gym").make("gsm8k")
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}): pip install {package}") from error
