"""What a person reads: the plain lines to the letter, and which console is chosen."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from trainer.tracking.console import STAGE_SECONDS, PlainConsole, make_console
from trainer.tracking.live_console import LiveConsole

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
