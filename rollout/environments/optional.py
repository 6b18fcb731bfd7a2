"""What environments in other people's packages have in common: the package may be missing, and what it raises."""

import importlib
from types import ModuleType

from rollout.rewards.outcome import described


class RolloutError(RuntimeError):
    """An environment, or its scoring, failed: the episode has no reward."""


def optional(module: str, package: str) -> ModuleType:
    """The module. Raises ImportError, which says how to install its package and what went wrong.

    Example: optional("skyrl_gym", "skyrl-gym").make("gsm8k")
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}): pip install {package}") from error


def with_causes(error: BaseException) -> str:
    """An error with what caused it: the package's own error alone does not always say what went wrong."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return ", because of ".join(map(described, causes))
