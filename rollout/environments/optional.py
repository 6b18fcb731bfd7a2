"""Helps with environments in other people's packages: the package may be missing, and its errors say little."""

import importlib
from types import ModuleType

from rollout.rewards.outcome import described


class RolloutError(RuntimeError):
    """An environment, or its scoring, failed: the episode has no reward."""


def optional(module: str, package: str) -> ModuleType:
    """Import a module. Raises ImportError, which says how to install its package and what went wrong.

    Example: optional("skyrl_gym", "skyrl-gym").make("gsm8k")
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}): pip install {package}") from error


def with_causes(error: BaseException) -> str:
    """Describe an error with what caused it: the package's own error alone does not always say what went wrong."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return ", because of ".join(map(described, causes))
