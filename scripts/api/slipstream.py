"""The import name of the project: `from slipstream import train, evaluate, sft, serve` (docs/python.md).

pyproject.toml maps this file to the package `slipstream`, in a wheel and in an editable installation alike. The code is
in `scripts.api`, so that it is there once.
"""

from scripts.api.commands import evaluate, serve, sft, train
from scripts.api.functions import environment, reward, tool
from scripts.api.results import EvaluationResult, Server, TrainResult, UnprovenError

__all__ = [
    "EvaluationResult",
    "Server",
    "TrainResult",
    "UnprovenError",
    "environment",
    "evaluate",
    "reward",
    "serve",
    "sft",
    "tool",
    "train",
]
