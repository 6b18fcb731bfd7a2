"""What the predictor says about a run, for the page: worked out by `python -m scripts.predict` in a process of its own.

It runs at the lowest priority, for one run at a time and for a bounded time, and its answer is kept until the run has
half as many steps more, or has ended.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trainer.tracking.recorder import SUMMARY_FILE

FEWEST_STEPS = 6
"""Steps that a run must have: the first ones warm up."""
GROWTH = 1.5
TIMEOUT_S = 600.0
"""On two busy cores, a run of 60 steps takes it two and a half minutes."""
WORST_FIT = 0.25
"""Where the simulation of the run's own steps is further off, nothing is predicted of others."""
COMMAND = (sys.executable, "-m", "scripts.predict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    steps: int
    """The run had so many."""
    text: str | None = None
    """None where the predictor cannot say anything, for `why`."""
    gain: float = 0.0
    about: str = ""
    """What it rests on."""
    why: str = ""

    @classmethod
    def of(cls, output: str, errors: str, exit_code: int, steps: int) -> Self:
        """Of what the command has printed: its last line is JSON."""
        if exit_code:
            last = errors.strip().rpartition("\n")[2] or f"exit code {exit_code}"
            return cls(steps=steps, why=last.removeprefix("predict error: "))
        figures = json.loads(output.strip().rpartition("\n")[2])
        (of_run,) = figures["runs"]
        off = of_run["simulated"] / of_run["measured"] - 1
        if abs(off) > WORST_FIT:
            return cls(steps=steps, why=f"its simulation of these {steps} steps is off by {off:+.0%}")
        about = f"Predicted from its first {steps} steps, which the simulation repeats within {abs(off):.0%}."
        return cls(steps=steps, text=figures["advice"], gain=figures["gain"], about=about)


class Predictor:
    """Example:
    predictor = Predictor()
    predictor.latest(run_dir, steps=40)  # None while the first is worked out
    """

    def __init__(self, command: Sequence[str] = COMMAND, timeout_s: float = TIMEOUT_S):
        self._command, self._timeout_s = tuple(command), timeout_s
        self._found: dict[Path, Predicted] = {}
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def latest(self, run_dir: Path, steps: int) -> Predicted | None:
        """The latest prediction, at once. Begins a new one where it is time and none is under way."""
        if self._is_due(run_dir, steps) and not self.is_busy:
            self._thread = threading.Thread(target=self._predict, args=(run_dir, steps), daemon=True)
            self._thread.start()
        return self._found.get(run_dir)

    def wait(self) -> None:
        """Until none is under way."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End the process that predicts."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _is_due(self, run_dir: Path, steps: int) -> bool:
        if steps < FEWEST_STEPS:
            return False
        found = self._found.get(run_dir)
        has_ended = (run_dir / SUMMARY_FILE).is_file()
        return found is None or steps >= GROWTH * found.steps or (has_ended and steps > found.steps)

    def _predict(self, run_dir: Path, steps: int) -> None:
        pipe = subprocess.PIPE
        try:
            with subprocess.Popen(
                [*self._command, f"run={run_dir}"], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
            ) as self._process:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
                try:
                    output, errors = self._process.communicate(timeout=self._timeout_s)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    why = f"it takes longer than {self._timeout_s:g} s; try `make predict`"
                    self._found[run_dir] = Predicted(steps=steps, why=why)
                    return
                self._found[run_dir] = Predicted.of(output, errors, self._process.returncode, steps)
        except OSError as error:
            self._found[run_dir] = Predicted(steps=steps, why=f"it cannot be started: {error}")
