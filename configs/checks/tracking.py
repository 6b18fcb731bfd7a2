"""Checks of what is recorded where."""

import importlib.util
from collections.abc import Iterator

from configs.checks.problem import Problem
from configs.schema import Config, SinkName


def tracking_problems(config: Config, trains: bool) -> Iterator[Problem]:
    """`trains`: whether the command trains; another may run on a machine that lacks the packages of sinks."""
    sinks = config.tracking.sinks
    shown = f"[{','.join(sink.value for sink in sinks)}]"
    if SinkName.jsonl not in sinks:
        yield Problem("tracking.sinks", "must have jsonl, which the audit and a resumed run read", shown)
    if len(set(sinks)) < len(sinks):
        yield Problem("tracking.sinks", "must name each sink once", shown)
    if trains and SinkName.tensorboard in sinks and not is_installed("tensorboard"):
        yield Problem("tracking.sinks", "tensorboard needs the package tensorboard: pip install tensorboard", shown)


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
