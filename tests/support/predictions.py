"""Predictions that take no time, for a process that should start fast."""

import time
from pathlib import Path

from scripts.dashboard.prediction import Predicted


def say(run_dir: Path, steps: int) -> Predicted:
    """Leave a mark in the run folder each time that it is asked."""
    with (run_dir / "asked").open("a") as file:
        file.write(".")
    return Predicted(steps=steps, text="do this.", gain=0.2)


def fail(run_dir: Path, steps: int) -> Predicted:
    raise ZeroDivisionError("division by zero")


def hang(run_dir: Path, steps: int) -> Predicted:
    time.sleep(60)
    raise AssertionError("it was not ended")
