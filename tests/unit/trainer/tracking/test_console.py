"""Both consoles as a person reads them, and which one is chosen."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console as Target

from trainer.tracking.console import LiveConsole, PlainConsole, make_console, sparkline

METRICS = {
    "critic/rewards/mean": 0.4123,
    "staleness/mean": 1.2,
    "staleness/max": 2.0,
    "perf/throughput": 3412.4,
    "weight_sync/pause_ms": 6.08,
    "rollout/ready_groups": 5.0,
    "rollout/inflight_groups": 8.0,
    "timing_s/step": 0.312,
}


def test_plain_lines_to_the_letter() -> None:
    stream = io.StringIO()
    console = PlainConsole(120, stream)
    console.step(1, {"critic/rewards/mean": math.nan})
    for text in ("starting 2 replicas", "starting 2 replicas", "training"):
        console.stage(text)
    console.evaluation(0, 0.142)
    console.step(12, METRICS)
    console.evaluation(120, 0.3)
    console.message("again")
    console.message("again")
    assert stream.getvalue().splitlines() == [
        "step   1/120  reward nan  acc -  staleness -/-  - tok/s  pause - ms  queue -+-  - s",
        "starting 2 replicas",
        "training",
        "eval   0/120  held-out accuracy 0.142",
        "step  12/120  reward 0.41  acc 0.14  staleness 1.2/2  3,412 tok/s  pause 6.1 ms  queue 5+8  0.31 s",
        "eval 120/120  held-out accuracy 0.300 (was 0.142)",
        "again",
        "again",
    ]


class Stream(io.StringIO):
    """A standard output of the given encoding that is a terminal or is not."""

    def __init__(self, encoding: str, terminal: bool) -> None:
        super().__init__()
        self._encoding = encoding
        self._terminal = terminal

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("stream", "term", "plain", "expected"),
    [
        (Stream("utf-8", terminal=True), "xterm", None, LiveConsole),
        (Stream("utf-8", terminal=True), "xterm", True, PlainConsole),
        (Stream("utf-8", terminal=True), "dumb", None, PlainConsole),
        (Stream("ascii", terminal=True), "xterm", None, PlainConsole),
        (Stream("utf-8", terminal=False), "xterm", None, PlainConsole),
        (Stream("utf-8", terminal=False), "xterm", False, LiveConsole),
    ],
)
def test_make_console_chooses_by_terminal_unless_told(
    monkeypatch: pytest.MonkeyPatch, stream: Stream, term: str, plain: bool | None, expected: type
) -> None:
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", term)
    console = make_console(10, Path("runs/first"), plain)
    console.close()
    assert type(console) is expected


class Disk(io.StringIO):
    """Takes nothing while it is full."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def test_output_on_a_full_disk_does_not_end_the_run() -> None:
    disk = Disk()
    console = PlainConsole(3, disk)
    console.message("one")
    disk.error = OSError(28, "No space left on device")
    console.message("two")
    disk.error = None
    console.message("three")
    assert disk.getvalue().splitlines() == ["one", "three"]
    disk.error = BrokenPipeError(32, "Broken pipe")
    with pytest.raises(BrokenPipeError):
        console.message("to nobody")


# -- the live panel ----------------------------------------------------------------------------------------------------


def make_live() -> tuple[LiveConsole, Target]:
    target = Target(record=True, width=110, file=io.StringIO())
    return LiveConsole(120, Path("runs/first"), target), target


def rendered(live: LiveConsole, target: Target) -> str:
    """Return the panel as text, with runs of blanks and the frame taken out."""
    live.close()
    target.export_text(clear=True)
    target.print(live.panel())
    return "\n".join(" ".join(line.strip("│").split()) for line in target.export_text().splitlines())


def test_live_panel_of_a_run() -> None:
    live, target = make_live()
    assert "starting" in rendered(live, target) and "held-out - pause - ms" in rendered(live, target)
    live.evaluation(0, 0.142)
    for step, reward in enumerate([0.0, 0.2, 0.4123], start=1):
        live.step(step, METRICS | {"critic/rewards/mean": reward})
    live.evaluation(3, 0.31)
    live.stage("training [1/2]")
    text = rendered(live, target)
    assert "slipstream runs/first" in text
    assert "training [1/2]" in text and "step 3/120 0:00:0" in text
    assert "reward 0.412 ▁▄█ throughput 3,412 tok/s" in text
    assert "held-out 0.142 -> 0.310 pause 6.1 ms" in text
    assert "staleness mean 1.20 max 2 queue 5 ready 8 in flight" in text


def test_live_messages_are_printed_literally_and_the_last_state_stays() -> None:
    live, target = make_live()
    live.message("wandb failed [red]really[/red]")
    live.step(120, METRICS)
    live.close()
    live.close()
    text = target.export_text()
    assert text.startswith("wandb failed [red]really[/red]\n")
    assert text.count("step 120/120") == 1


def test_sparkline_shows_the_latest_finite_values_from_lowest_to_highest() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.5, 0.5, math.nan]) == "▁▁"
    assert sparkline([99.0] * 9 + [0.0] * 10 + [0, 1, 2, 3, 4, 5, 6, 7]) == "▁" * 10 + "▁▂▃▄▅▆▇█"
