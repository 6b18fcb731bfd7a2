"""The live panel, rendered to text by a recording rich console."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console as Target

from trainer.tracking.live_console import PANEL_WIDTH, LiveConsole, sparkline

METRICS = {
    "critic/rewards/mean": 0.4123,
    "staleness/mean": 1.2,
    "staleness/max": 2.0,
    "perf/throughput": 3412.4,
    "weight_sync/pause_ms": 6.08,
    "rollout/ready_groups": 5.0,
    "rollout/inflight_groups": 8.0,
}


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_live(width: int = 110) -> tuple[LiveConsole, Target, Clock]:
    target, clock = Target(record=True, width=width, file=io.StringIO()), Clock()
    return LiveConsole(120, Path("runs/first"), target, clock), target, clock


def rendered(live: LiveConsole, target: Target) -> str:
    """Return the panel as text, with runs of blanks and the frame taken out."""
    live.close()
    target.export_text(clear=True)
    target.print(live.panel())
    return "\n".join(" ".join(line.strip("│").split()) for line in target.export_text().splitlines())


def test_live_panel_before_anything_happened() -> None:
    live, target, _ = make_live()
    text = rendered(live, target)
    assert "slipstream runs/first" in text
    assert "starting 0:00" in text
    assert "step 0/120" in text
    assert "reward - throughput - tok/s" in text
    assert "held-out - pause - ms" in text
    assert "staleness mean - max - queue - ready - in flight" in text


def test_live_panel_of_a_run() -> None:
    live, target, clock = make_live()
    live.evaluation(0, 0.142)
    for step, reward in enumerate([0.0, 0.2, 0.4123], start=1):
        live.step(step, METRICS | {"critic/rewards/mean": reward})
    live.evaluation(3, 0.31)
    live.stage("training [1/2]")
    clock.now = 83.9
    text = rendered(live, target)
    assert "training [1/2] 1:23" in text
    assert "step 3/120" in text
    assert "reward 0.412 ▁▄█ throughput 3,412 tok/s" in text
    assert "held-out 0.142 -> 0.310 pause 6.1 ms" in text
    assert "staleness mean 1.20 max 2 queue 5 ready 8 in flight" in text


def test_live_progress_bar_grows_with_the_steps() -> None:
    def cells(step: int) -> int:
        live, _, _ = make_live()
        live.step(step, {})
        live.close()
        target = Target(record=True, width=110, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        target.print(live.panel())
        done = target.export_text(styles=True).split("\x1b[36m━")[1]
        return len(done.split("\x1b")[0])

    assert cells(30) < cells(60) < cells(119)


@pytest.mark.parametrize(("width", "expected"), [(60, 60), (200, PANEL_WIDTH)])
def test_live_panel_fits_the_terminal(width: int, expected: int) -> None:
    live, target, _ = make_live(width)
    live.close()
    target.export_text(clear=True)
    target.print(live.panel())
    assert {len(line) for line in target.export_text().splitlines()} == {expected}


def test_live_messages_are_printed_literally_and_the_last_state_stays() -> None:
    live, target, _ = make_live()
    live.message("wandb failed [red]really[/red]")
    live.step(120, METRICS)
    live.close()
    live.close()
    text = target.export_text()
    assert text.startswith("wandb failed [red]really[/red]\n")
    assert text.count("step 120/120") == 1


def test_sparkline_shows_the_whole_history_in_bars_of_equal_shares() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([0.5, 0.5, math.nan], 8) == "▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"
    assert len(sparkline([float(i % 7) for i in range(1000)], 18)) == 18
