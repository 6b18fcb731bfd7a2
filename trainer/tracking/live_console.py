"""A panel of a run in a terminal: drawn in place, at most 80 columns wide and 14 lines high, messages scroll above."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console as Target
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.tracking.progress import Activity, Progress, duration

WIDTH = 80
"""The largest width of the panel, in columns."""
FRAMES_PER_SECOND = 2
"""A frame takes some milliseconds of the driver's process."""
SPARKLINE_WIDTH = 16
"""The number of the latest rewards that are drawn."""
NAMED_REPLICAS = 3
"""The number of replicas that fit on a line with their states. If there are more, they are counted by state."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """The state of a replica, as it is shown."""

    name: str
    state: str
    """The name of the state, for example READY."""
    global_steps: int
    """Version of its weights; -1 before the first."""
    is_dead: bool = False

    @property
    def text(self) -> str:
        """The state and the version, for example "READY v23"."""
        return self.state if self.global_steps < 0 else f"{self.state} v{self.global_steps}"


class LiveConsole:
    """A panel that is redrawn in place, with messages scrolling above it.

    Until the first step it shows what goes on and for how long, then the metrics of the latest step.
    """

    def __init__(self, progress: Progress, run_dir: Path, target: Target) -> None:
        """Start drawing on `target`."""
        self._progress = progress
        self._run_dir = run_dir
        self._target = target
        self._stage: Activity | None = None
        self._metrics: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._replicas: Callable[[], Sequence[ReplicaView]] = tuple
        self._is_over = False
        self._live = Live(get_renderable=self.panel, console=target, refresh_per_second=FRAMES_PER_SECOND)
        self._live.start()

    def stage(self, text: str) -> None:
        before = self._stage
        if before is not None and before.text == text:
            return
        self._stage = self._progress.begin(text)
        if before is not None:
            self._ended(before)

    @contextmanager
    def during(self, text: str) -> Iterator[Callable[[str], None]]:
        activity = self._progress.begin(text)

        def show(detail: str) -> None:
            activity.detail = detail

        yield show
        self._ended(activity)

    def watch(self, replicas: Callable[[], Sequence[ReplicaView]]) -> None:
        self._replicas = replicas

    def resumed(self, global_steps: int, accuracies: Sequence[tuple[int, float]]) -> None:
        self._progress.continue_from(global_steps, accuracies)

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None:
        self._progress.take_step(global_steps)
        self._metrics = dict(metrics)
        if "critic/rewards/mean" in metrics:
            self._rewards.append(metrics["critic/rewards/mean"])
            del self._rewards[:-SPARKLINE_WIDTH]

    def evaluation(self, global_steps: int, accuracy: float) -> None:
        self._progress.accuracies.append((global_steps, accuracy))

    def message(self, text: str) -> None:
        with suppress(OSError):  # the terminal is gone
            self._target.print(Text(text), soft_wrap=True)

    def end(self, state: str, text: str) -> None:
        self.stage(state)
        self._is_over = True
        self.close()
        self.message(text)

    def close(self) -> None:
        with suppress(OSError):
            self._live.stop()

    def _ended(self, activity: Activity) -> None:
        self.message(f"{activity.text}: {duration(self._progress.end(activity))}")

    # -- the panel -----------------------------------------------------------------------------------------------------

    def panel(self) -> Panel:
        """Return the panel of the current state."""
        body = self._activities()
        if self._metrics:
            body = self._supervised() if is_supervised(self._metrics) else self._numbers()
        here = Path.cwd()
        run_dir = self._run_dir.relative_to(here) if self._run_dir.is_relative_to(here) else self._run_dir
        title = f"slipstream  {run_dir}"
        return Panel(Group(self._head(), "", body), title=title, title_align="left", width=WIDTH, border_style="dim")

    def _head(self) -> Table:
        progress, stage = self._progress, self._stage
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(style="cyan", no_wrap=True, max_width=30)
        head.add_column(ratio=1)
        head.add_column(style="dim", no_wrap=True)
        head.add_row(
            stage.text if stage is not None and (self._metrics or self._is_over) else "starting",
            ProgressBar(total=progress.total_steps, completed=progress.global_steps, complete_style="cyan"),
            f"step {progress.global_steps}/{progress.total_steps}  {duration(progress.elapsed_s)}"
            + ("" if self._is_over else f"  ETA {duration(progress.remaining_s())}"),
        )
        return head

    def _activities(self) -> Table:
        """Return a table of what goes on, and for how long."""
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(ratio=1, no_wrap=True)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(justify="right", style="dim", no_wrap=True)
        for activity in list(self._progress.activities):
            table.add_row(activity.text, activity.detail, duration(self._progress.clock() - activity.since))
        return table

    def _supervised(self) -> Table:
        """Return a table of the latest step of a supervised run."""
        show, table = formatter(self._metrics), _in_pairs()
        table.add_row("loss", show("actor/ce_loss", ".4f"), "grad norm", show("actor/grad_norm", ".3f"))
        table.add_row("epoch", show("sft/epoch", ".2f"), "lr", show("actor/lr", ".2e"))
        trained = f"{show('perf/trained_tokens', ',.0f')}  {show('perf/throughput/trained', ',.0f')} tok/s"
        table.add_row("tokens", trained, "step", f"{show('timing_s/step', '.2f')} s")
        return table

    def _numbers(self) -> Group:
        """Return tables of the latest step."""
        show, accuracies, table = formatter(self._metrics), self._progress.accuracies, _in_pairs()
        reward = Text(show("critic/rewards/mean", ".3f"))
        reward.append("  " + sparkline(self._rewards), style="green")
        ends = [accuracy for _, accuracy in (accuracies if len(accuracies) < 2 else (accuracies[0], accuracies[-1]))]
        is_better = len(ends) == 2 and ends[1] > ends[0]
        held_out = Text(" -> ".join(f"{accuracy:.3f}" for accuracy in ends) or "-", style="green" if is_better else "")
        kl = show("actor/rollout_kl", "z.4f")
        if "actor/kl_loss" in self._metrics:
            kl += f"  reference {show('actor/kl_loss', '.3f')}"
        table.add_row("reward", reward, "held-out", held_out)
        table.add_row("loss", show("actor/pg_loss", "z.4f"), "grad norm", show("actor/grad_norm", ".3f"))
        table.add_row("KL", kl, "entropy", show("actor/entropy", ".3f"))
        length = f"mean {show('response_length/mean', '.0f')}  max {show('response_length/max', '.0f')}"
        staleness = f"mean {show('staleness/mean', '.2f')}  max {show('staleness/max', '.0f')}"
        table.add_row("length", length, "staleness", staleness)
        generated, trained = (show(f"perf/throughput/{kind}", ",.0f") for kind in ("generated", "trained"))
        table.add_row("generated", f"{generated} tok/s", "trained", f"{trained} tok/s")
        idle = f"trainer {show('perf/trainer_idle', '.0%')}  replicas {show('perf/replica_idle', '.0%')}"
        table.add_row("idle", idle, "pause", f"{show('weight_sync/pause_ms', '.1f')} ms")
        queue = f"{show('rollout/ready_groups', '.0f')} ready  {show('rollout/inflight_groups', '.0f')} in flight"
        table.add_row("queue", queue, "step", f"{show('timing_s/step', '.2f')} s")
        replicas = Table.grid(padding=(0, 2))
        replicas.add_row(Text("replicas ", style="dim"), Text(replica_text(self._replicas()), style="bold"))
        return Group(table, replicas)


def _in_pairs() -> Table:
    """Return a table of two columns of names, each with a column of values."""
    table = Table.grid(padding=(0, 2), expand=True)
    for style, ratio in (("dim", None), ("bold", 1), ("dim", None), ("bold", 1)):
        table.add_column(style=style, ratio=ratio, no_wrap=True)
    return table


def is_supervised(metrics: Mapping[str, float]) -> bool:
    """Return whether the step learned from conversations alone."""
    return "actor/ce_loss" in metrics and "critic/rewards/mean" not in metrics


def replica_text(replicas: Sequence[ReplicaView]) -> str:
    """Return the replicas by name or, if they are many, how many are in each state. Dead ones are only counted."""
    alive = [replica for replica in replicas if not replica.is_dead]
    if len(alive) <= NAMED_REPLICAS:
        parts = [f"{replica.name} {replica.text}" for replica in alive]
    else:
        parts = [f"{count} {text}" for text, count in Counter(replica.text for replica in alive).most_common()]
    num_dead = len(replicas) - len(alive)
    return "  ".join([*parts, *([f"{num_dead} DEAD"] if num_dead else [])]) or "-"


def sparkline(values: Sequence[float]) -> str:
    """Return the latest finite values as bars, lowest to highest."""
    latest = [value for value in values if math.isfinite(value)][-SPARKLINE_WIDTH:]
    low, span = min(latest, default=0), max(latest, default=0) - min(latest, default=0)
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1)) if span else 0] for value in latest)


def formatter(metrics: Mapping[str, float]) -> Callable[[str, str], str]:
    """Return a function that writes a metric in the given format, or "-" where it is missing."""
    return lambda key, spec: format(metrics[key], spec) if key in metrics else "-"
