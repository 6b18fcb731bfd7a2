"""Both consoles as a person reads them, and which one is chosen."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console as Target

from trainer.tracking.console import PANEL_WIDTH, STAGE_SECONDS, LiveConsole, PlainConsole, make_console, sparkline

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


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Plain:
    """A plain console, its clock, and the lines written so far."""

    def __init__(self, total_steps: int = 120) -> None:
        self.stream = io.StringIO()
        self.clock = Clock()
        self.console = PlainConsole(total_steps, self.stream, self.clock)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_plain_step_line_to_the_letter() -> None:
    plain = Plain()
    plain.console.evaluation(0, 0.142)
    plain.console.step(12, METRICS)
    assert plain.lines == [
        "eval   0/120  held-out accuracy 0.142",
        "step  12/120  reward 0.41  acc 0.14  staleness 1.2/2  3,412 tok/s  pause 6.1 ms  queue 5+8  0.31 s",
    ]


def test_plain_shows_what_is_missing_or_broken() -> None:
    plain = Plain(total_steps=9)
    plain.console.step(1, {})
    plain.console.step(2, {"critic/rewards/mean": math.nan})
    assert plain.lines == [
        "step 1/9  reward -  acc -  staleness -/-  - tok/s  pause - ms  queue -+-  - s",
        "step 2/9  reward nan  acc -  staleness -/-  - tok/s  pause - ms  queue -+-  - s",
    ]


def test_plain_evaluation_says_what_the_accuracy_was_before() -> None:
    plain = Plain()
    plain.console.evaluation(0, 0.1)
    plain.console.evaluation(120, 0.3)
    assert plain.lines[1] == "eval 120/120  held-out accuracy 0.300 (was 0.100)"


def test_plain_stages_are_written_once_and_their_progress_is_rate_limited() -> None:
    plain = Plain()
    plain.console.stage("starting 2 replicas")
    plain.console.stage("starting 2 replicas")
    for done in range(0, 801, 100):
        plain.clock.now = done / 800 * STAGE_SECONDS * 1.9
        plain.console.stage(f"warm-up {done}/800 loss {2 - done / 800:.2f}")
    assert plain.lines == ["starting 2 replicas", "warm-up 0/800 loss 2.00", "warm-up 500/800 loss 1.38"]
    plain.console.message("checkpoint saved")
    plain.console.message("again")
    assert plain.lines[3:] == ["warm-up 800/800 loss 1.00", "checkpoint saved", "again"]


def test_plain_stage_may_come_back_and_close_writes_what_was_held_back() -> None:
    plain = Plain()
    for text in ("evaluating", "training", "evaluating", "saving 1/2", "saving 2/2"):
        plain.console.stage(text)
    assert plain.lines == ["evaluating", "training", "evaluating", "saving 1/2"]
    plain.console.close()
    plain.console.close()
    assert plain.lines[4:] == ["saving 2/2"]


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


def test_output_on_a_full_disk_does_not_end_the_run_and_what_is_missing_is_said_when_there_is_room() -> None:
    disk = Disk()
    console = PlainConsole(3, disk)
    console.message("one")
    disk.error = OSError(28, "No space left on device")
    console.message("two")
    console.message("three")
    disk.error = None
    console.message("four")
    console.message("five")
    assert disk.getvalue().splitlines() == ["one", "four", "2 lines could not be written here", "five"]
    disk.error = BrokenPipeError(32, "Broken pipe")
    with pytest.raises(BrokenPipeError):
        console.message("to nobody")


# -- the live panel ----------------------------------------------------------------------------------------------------


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
