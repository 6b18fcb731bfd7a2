"""The live panel of a run, drawn with rich and redrawn in place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console as Target
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PANEL_WIDTH = 92
"""Columns of the live panel at most."""
SPARKLINE_WIDTH = 18
"""Characters of the reward history at most."""
_BARS = "▁▂▃▄▅▆▇█"


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
        """Show `text` in the panel's first line."""
        self._stage = text

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one step and add its reward to the history."""
        self._global_steps, self._metrics = global_steps, dict(metrics)
        if "critic/rewards/mean" in metrics:
            self._rewards.append(metrics["critic/rewards/mean"])

    def evaluation(self, global_steps: int, accuracy: float) -> None:
        """Show the accuracy beside the first one."""
        self._accuracies.append(accuracy)

    def message(self, text: str) -> None:
        """Print `text` above the panel."""
        self._target.print(Text(text))

    def close(self) -> None:
        """Draw once more and give the terminal back."""
        self._live.stop()

    def panel(self) -> Panel:
        """Return the panel of the present state."""
        minutes, seconds = divmod(int(self._clock() - self._started), 60)
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", style="dim")
        head.add_row(Text(self._stage, style="cyan", overflow="ellipsis", no_wrap=True), f"{minutes}:{seconds:02d}")
        bar = ProgressBar(total=self._total_steps, completed=self._global_steps, complete_style="cyan")
        head.add_row(bar, f"step {self._global_steps}/{self._total_steps}")

        show = self._show
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

    def _show(self, key: str, spec: str) -> str:
        return show_metric(self._metrics, key, spec)

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


def show_metric(metrics: Mapping[str, float], key: str, spec: str) -> str:
    """Return the metric in the given format, or "-" when it is missing."""
    return format(metrics[key], spec) if key in metrics else "-"
