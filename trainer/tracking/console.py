"""The progress of a run on the screen: a live rich panel in a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console as Target
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

STAGE_SECONDS = 5.0
"""Plain mode writes the progress of one stage at most this often."""
PANEL_WIDTH = 92
"""Largest width of the live panel, in columns."""
SPARKLINE_WIDTH = 18
"""Largest width of the reward history, in characters."""
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?")
_BARS = "▁▂▃▄▅▆▇█"


class Console(Protocol):
    """The progress of a run, for a person."""

    def stage(self, text: str) -> None:
        """Show the current stage, for example "starting 2 replicas" or "warm-up 300/800 loss 1.2"."""
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
        accuracy = "-" if math.isnan(self._accuracy) else f"{self._accuracy:.2f}"

        def show(key: str, spec: str) -> str:
            return _show(metrics, key, spec)

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
        before = "" if math.isnan(self._accuracy) else f" (was {self._accuracy:.3f})"
        self._accuracy = accuracy
        self._write(f"eval {self._position(global_steps)}  held-out accuracy {accuracy:.3f}{before}")

    def message(self, text: str) -> None:
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
            raise  # the reader of the pipe is gone
        except OSError:  # a full disk under a redirected output
            self._unwritten += 1
        else:
            if self._unwritten:
                self._unwritten, count = 0, self._unwritten
                self._write(f"{count} lines could not be written here")


class LiveConsole:
    """A panel that is redrawn in place, with messages scrolling above it."""

    def __init__(
        self,
        total_steps: int,
        run_dir: Path,
        target: Target,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start drawing on `target`; `clock` returns seconds."""
        self._total_steps = total_steps
        self._run_dir = run_dir
        self._target = target
        self._clock = clock
        self._started = clock()
        self._stage = "starting"
        self._global_steps = 0
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []
        self._accuracies: list[float] = []
        self._live = Live(get_renderable=self.panel, console=target, refresh_per_second=4)
        self._live.start()

    def stage(self, text: str) -> None:
        self._stage = text

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one step and add its reward to the history."""
        self._global_steps, self._metrics = global_steps, dict(metrics)
        if "critic/rewards/mean" in metrics:
            self._rewards.append(metrics["critic/rewards/mean"])

    def evaluation(self, global_steps: int, accuracy: float) -> None:
        self._accuracies.append(accuracy)

    def message(self, text: str) -> None:
        self._target.print(Text(text))

    def close(self) -> None:
        self._live.stop()

    def panel(self) -> Panel:
        """Return the panel of the current state."""
        minutes, seconds = divmod(int(self._clock() - self._started), 60)
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", style="dim")
        head.add_row(Text(self._stage, style="cyan", overflow="ellipsis", no_wrap=True), f"{minutes}:{seconds:02d}")
        bar = ProgressBar(total=self._total_steps, completed=self._global_steps, complete_style="cyan")
        head.add_row(bar, f"step {self._global_steps}/{self._total_steps}")

        def show(key: str, spec: str) -> str:
            return _show(self._metrics, key, spec)

        body = Table.grid(padding=(0, 2), expand=True)
        for style, ratio in (("dim", None), ("bold", 1), ("dim", None), ("bold", 1)):
            body.add_column(style=style, ratio=ratio, no_wrap=True)
        reward = Text(show("critic/rewards/mean", ".3f"))
        reward.append("  " + sparkline(self._rewards, SPARKLINE_WIDTH), style="green")
        staleness = f"mean {show('staleness/mean', '.2f')}  max {show('staleness/max', '.0f')}"
        queue = f"{show('rollout/ready_groups', '.0f')} ready  {show('rollout/inflight_groups', '.0f')} in flight"
        body.add_row("reward", reward, "throughput", f"{show('perf/throughput', ',.0f')} tok/s")
        body.add_row("held-out", self._held_out(), "pause", f"{show('weight_sync/pause_ms', '.1f')} ms")
        body.add_row("staleness", staleness, "queue", queue)

        layout = Table.grid(expand=True)
        layout.add_row(head)
        layout.add_row("")
        layout.add_row(body)
        return Panel(
            layout, title=f"slipstream  {self._run_dir}", title_align="left", width=PANEL_WIDTH, border_style="dim"
        )

    def _held_out(self) -> Text:
        if not self._accuracies:
            return Text("-")
        first, now = self._accuracies[0], self._accuracies[-1]
        return Text(f"{first:.3f} -> {now:.3f}", style="green" if now > first else "")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the finite values as at most `width` bars, lowest to highest; each bar is the mean of an equal share."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if not count:
        return ""
    edges = [len(finite) * i // count for i in range(count + 1)]
    shares = [finite[start:end] for start, end in pairwise(edges)]
    means = [sum(share) / len(share) for share in shares]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 0] for mean in means)


def _show(metrics: Mapping[str, float], key: str, spec: str) -> str:
    """Return the metric in the given format, or "-" when it is missing."""
    return format(metrics[key], spec) if key in metrics else "-"
