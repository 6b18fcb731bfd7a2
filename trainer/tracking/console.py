"""The progress of a run on the screen: a live rich panel in a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console as Target
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

PANEL_WIDTH = 92
"""Largest width of the live panel, in columns."""
SPARKLINE_WIDTH = 18
"""How many of the latest rewards the live panel draws."""
_BARS = "▁▂▃▄▅▆▇█"


class Console(Protocol):
    """The progress of a run, for a person."""

    def stage(self, text: str) -> None: ...

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, global_steps: int, accuracy: float) -> None:
        """Show the held-out accuracy, in [0, 1], of the weights tagged `global_steps`."""
        ...

    def message(self, text: str) -> None:
        """Show something worth keeping on the screen, for example a warning."""
        ...

    def close(self) -> None: ...


def make_console(total_steps: int, run_dir: Path, plain: bool | None = None) -> Console:
    """Return the plain console if `plain` is true, the live one if false; None decides by stdout being a terminal."""
    if plain is None:
        encoding = (sys.stdout.encoding or "").lower()
        plain = not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or not encoding.startswith("utf")
    if plain:
        return PlainConsole(total_steps, sys.stdout)
    return LiveConsole(total_steps, run_dir, Target())


class PlainConsole:
    """Writes one line per step, evaluation, stage and message. A full disk under a redirected output loses lines."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._total_steps = total_steps
        self._stream = stream
        self._accuracy = math.nan
        self._stage = ""

    def stage(self, text: str) -> None:
        if text != self._stage:
            self._stage = text
            self.message(text)

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None:
        show = _formatter(metrics)
        fields = (
            f"step {self._position(global_steps)}",
            f"reward {show('critic/rewards/mean', '.2f')}",
            f"acc {'-' if math.isnan(self._accuracy) else f'{self._accuracy:.2f}'}",
            f"staleness {show('staleness/mean', '.1f')}/{show('staleness/max', '.0f')}",
            f"{show('perf/throughput', ',.0f')} tok/s",
            f"pause {show('weight_sync/pause_ms', '.1f')} ms",
            f"queue {show('rollout/ready_groups', '.0f')}+{show('rollout/inflight_groups', '.0f')}",
            f"{show('timing_s/step', '.2f')} s",
        )
        self.message("  ".join(fields))

    def evaluation(self, global_steps: int, accuracy: float) -> None:
        before = "" if math.isnan(self._accuracy) else f" (was {self._accuracy:.3f})"
        self._accuracy = accuracy
        self.message(f"eval {self._position(global_steps)}  held-out accuracy {accuracy:.3f}{before}")

    def message(self, text: str) -> None:
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except BrokenPipeError:
            raise  # the reader of the pipe is gone
        except OSError:
            pass

    def close(self) -> None: ...

    def _position(self, global_steps: int) -> str:
        return f"{global_steps:>{len(str(self._total_steps))}}/{self._total_steps}"


class LiveConsole:
    """A panel that is redrawn in place, with messages scrolling above it."""

    def __init__(self, total_steps: int, run_dir: Path, target: Target) -> None:
        """Start drawing on `target`."""
        self._run_dir = run_dir
        self._target = target
        self._progress = Progress(
            TextColumn(
                "{task.description}", style="cyan", markup=False, table_column=Column(max_width=48, no_wrap=True)
            ),
            BarColumn(bar_width=None, complete_style="cyan"),
            TextColumn("step {task.completed}/{task.total}", style="dim"),
            TimeElapsedColumn(),
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=total_steps)
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []
        self._accuracies: list[float] = []
        self._live = Live(get_renderable=self.panel, console=target, refresh_per_second=4)
        self._live.start()

    def stage(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None:
        self._progress.update(self._task, completed=global_steps)
        self._metrics = dict(metrics)
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
        show = _formatter(self._metrics)
        body = Table.grid(padding=(0, 2), expand=True)
        for style, ratio in (("dim", None), ("bold", 1), ("dim", None), ("bold", 1)):
            body.add_column(style=style, ratio=ratio, no_wrap=True)
        reward = Text(show("critic/rewards/mean", ".3f"))
        reward.append("  " + sparkline(self._rewards), style="green")
        staleness = f"mean {show('staleness/mean', '.2f')}  max {show('staleness/max', '.0f')}"
        queue = f"{show('rollout/ready_groups', '.0f')} ready  {show('rollout/inflight_groups', '.0f')} in flight"
        first, now = (self._accuracies[0], self._accuracies[-1]) if self._accuracies else (math.nan, math.nan)
        held_out = Text(f"{first:.3f} -> {now:.3f}" if self._accuracies else "-", style="green" if now > first else "")
        body.add_row("reward", reward, "throughput", f"{show('perf/throughput', ',.0f')} tok/s")
        body.add_row("held-out", held_out, "pause", f"{show('weight_sync/pause_ms', '.1f')} ms")
        body.add_row("staleness", staleness, "queue", queue)
        title = f"slipstream  {self._run_dir}"
        layout = Group(self._progress, "", body)
        return Panel(layout, title=title, title_align="left", width=PANEL_WIDTH, border_style="dim")


def sparkline(values: Sequence[float]) -> str:
    """Return the latest finite values as bars, lowest to highest."""
    latest = [value for value in values if math.isfinite(value)][-SPARKLINE_WIDTH:]
    low, span = min(latest, default=0), max(latest, default=0) - min(latest, default=0)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in latest)


def _formatter(metrics: Mapping[str, float]) -> Callable[[str, str], str]:
    """Return a function that writes a metric in the given format, or "-" where it is missing."""
    return lambda key, spec: format(metrics[key], spec) if key in metrics else "-"
