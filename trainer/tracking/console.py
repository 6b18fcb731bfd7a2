"""What a person sees while training: a live rich panel in a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console as Target

from trainer.tracking.live_console import LiveConsole, show_metric

STAGE_SECONDS = 5.0
"""Plain mode writes the progress of one stage at most this often."""
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?")


class Console(Protocol):
    """The progress of a run, for a person."""

    def stage(self, text: str) -> None:
        """Say what is going on, for example "starting 2 replicas" or "warm-up 300/800 loss 1.2"."""
        ...

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one optimizer step; missing ones are shown as "-"."""
        ...

    def evaluation(self, global_steps: int, accuracy: float) -> None:
        """Show the held-out accuracy, in [0, 1], of the weights tagged `global_steps`."""
        ...

    def message(self, text: str) -> None:
        """Show something worth keeping on the screen, for example a warning."""
        ...

    def close(self) -> None:
        """Leave the last state on the screen. A second call does nothing."""
        ...


def make_console(total_steps: int, run_dir: Path, plain: bool | None = None) -> Console:
    """Return the plain console if `plain` is true, the live one if false; None decides by stdout being a terminal."""
    if plain is None:
        encoding = (sys.stdout.encoding or "").lower()
        plain = not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or not encoding.startswith("utf")
    if plain:
        return PlainConsole(total_steps, sys.stdout)
    return LiveConsole(total_steps, run_dir, Target())


class PlainConsole:
    """One line per step, evaluation and stage. The progress of a stage (same text, other numbers) is rate-limited."""

    def __init__(self, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to `stream`; `clock` returns seconds."""
        self._total_steps = total_steps
        self._stream = stream
        self._clock = clock
        self._accuracy = math.nan
        self._stage = ""
        self._stage_written = -math.inf
        self._held_back = False
        self._unwritten = 0

    def stage(self, text: str) -> None:
        """Write a new stage at once, its progress every `STAGE_SECONDS`, and the last of it before the next line."""
        if text == self._stage:
            return
        progress = _NUMBER.sub("#", text) == _NUMBER.sub("#", self._stage)
        if progress and self._clock() - self._stage_written < STAGE_SECONDS:
            self._stage, self._held_back = text, True
            return
        if progress:
            self._held_back = False
        self._write(text)
        self._stage, self._stage_written = text, self._clock()

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None:
        """Write the line of one step."""
        accuracy = "-" if math.isnan(self._accuracy) else f"{self._accuracy:.2f}"

        def show(key: str, spec: str) -> str:
            return show_metric(metrics, key, spec)

        fields = (
            f"step {self._position(global_steps)}",
            f"reward {show('critic/rewards/mean', '.2f')}",
            f"acc {accuracy}",
            f"staleness {show('staleness/mean', '.1f')}/{show('staleness/max', '.0f')}",
            f"{show('perf/throughput', ',.0f')} tok/s",
            f"pause {show('weight_sync/pause_ms', '.1f')} ms",
            f"queue {show('rollout/ready_groups', '.0f')}+{show('rollout/inflight_groups', '.0f')}",
            f"{show('timing_s/step', '.2f')} s",
        )
        self._write("  ".join(fields))

    def evaluation(self, global_steps: int, accuracy: float) -> None:
        """Write the accuracy, and what it was before."""
        before = "" if math.isnan(self._accuracy) else f" (was {self._accuracy:.3f})"
        self._accuracy = accuracy
        self._write(f"eval {self._position(global_steps)}  held-out accuracy {accuracy:.3f}{before}")

    def message(self, text: str) -> None:
        """Write `text` as it is."""
        self._write(text)

    def close(self) -> None:
        """Write the progress that was held back, if any."""
        self._release()

    def _position(self, global_steps: int) -> str:
        return f"{global_steps:>{len(str(self._total_steps))}}/{self._total_steps}"

    def _release(self) -> None:
        if self._held_back:
            self._held_back = False
            self._write(self._stage)

    def _write(self, line: str) -> None:
        self._release()
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except BrokenPipeError:
            raise  # nobody reads it any more
        except OSError:  # a full disk under a redirected output
            self._unwritten += 1
        else:
            if self._unwritten:
                self._unwritten, count = 0, self._unwritten
                self._write(f"{count} lines could not be written here")
