"""Both consoles as a person reads them, and which one is chosen."""

from __future__ import annotations

import io
import math
import os
from pathlib import Path

import pytest
from rich.console import Console as Target

from trainer.tracking.console import LiveConsole, PlainConsole, make_console
from trainer.tracking.live_console import ReplicaView, replica_text, sparkline
from trainer.tracking.progress import Progress, duration

METRICS = {
    "critic/rewards/mean": 0.4123,
    "actor/pg_loss": -0.0123,
    "actor/rollout_kl": 0.00123,
    "actor/entropy": 0.456,
    "actor/grad_norm": 0.789,
    "response_length/mean": 21.4,
    "response_length/max": 32.0,
    "staleness/mean": 1.2,
    "staleness/max": 2.0,
    "perf/throughput/generated": 3412.4,
    "perf/throughput/trained": 1204.6,
    "perf/trainer_idle": 0.12,
    "perf/replica_idle": 0.305,
    "weight_sync/pause_ms": 6.08,
    "rollout/ready_groups": 5.0,
    "rollout/inflight_groups": 8.0,
    "timing_s/step": 0.312,
}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_plain_lines_to_the_letter() -> None:
    stream, clock = io.StringIO(), Clock()
    console = PlainConsole(120, stream, Progress(total_steps=120, clock=clock))
    for text in ("starting 2 replicas", "starting 2 replicas"):
        console.stage(text)
    with console.during("warm-up") as show:
        clock.seconds = 62
        show("50/600")
        clock.seconds = 75.4
    console.evaluation(0, 0.142)
    console.stage("training")
    console.step(1, {"critic/rewards/mean": math.nan})
    clock.seconds += 11 * 1.5
    console.step(12, METRICS)
    console.evaluation(120, 0.3)
    console.message("again")
    console.message("again")
    assert stream.getvalue().splitlines() == [
        "[0:00] starting 2 replicas",
        "[0:00] warm-up",
        "[1:02] warm-up: 50/600",
        "[1:15] warm-up: done in 1:15",
        "eval   0/120  held-out accuracy 0.142",
        "[1:15] training",
        "step   1/120  reward nan  acc 0.14  loss -  kl -  entropy -  grad -  length -  staleness -/-  "
        "generated - tok/s  trained - tok/s  idle -/-  pause - ms  queue -+-  - s  eta -",
        "step  12/120  reward 0.41  acc 0.14  loss -0.012  kl 0.0012  entropy 0.46  grad 0.79  length 21  "
        "staleness 1.2/2  generated 3,412 tok/s  trained 1,205 tok/s  idle 12%/30%  pause 6.1 ms  queue 5+8  0.31 s  "
        "eta 2:42",
        "eval 120/120  held-out accuracy 0.300 (was 0.142)",
        "again",
        "again",
    ]


def test_a_resumed_run_knows_its_accuracy() -> None:
    stream = io.StringIO()
    console = PlainConsole(120, stream)
    console.resumed(60, [(0, 0.142), (40, 0.25)])
    console.step(61, METRICS)
    console.evaluation(80, 0.3)
    assert "acc 0.25" in stream.getvalue() and "0.300 (was 0.250)" in stream.getvalue()
    live, target = make_live()
    live.resumed(60, [(0, 0.142), (40, 0.25)])
    live.step(61, METRICS)
    assert "step 61/120" in (text := rendered(live, target)) and "held-out 0.142 -> 0.250" in text


def test_what_does_not_end_well_is_not_said_to_be_done() -> None:
    stream = io.StringIO()
    with pytest.raises(OSError, match="gone"), PlainConsole(1, stream).during("loading"):
        raise OSError("gone")
    assert stream.getvalue() == "[0:00] loading\n"


def test_time_left_is_at_the_pace_of_the_latest_steps() -> None:
    clock = Clock()
    progress = Progress(total_steps=100, clock=clock)
    assert progress.remaining_s() is None
    for step in range(1, 31):
        progress.take_step(step)
        assert (progress.remaining_s() is None) == (step == 1)
        clock.seconds += 100 if step < 10 else 2
    assert progress.remaining_s() == 70 * 2 - 2, "the slow first steps are past, and 2 s of the next have passed"
    clock.seconds += 1000
    assert progress.remaining_s() == 0


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.4, "0:00"), (83.4, "1:23"), (3700, "1:01:40")])
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


class Stream(io.TextIOWrapper):
    """A standard output of the given encoding that is a terminal or is not."""

    def __init__(self, encoding: str, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding)
        self._terminal = terminal

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


def test_the_end_of_what_reads_the_output_does_not_end_the_run() -> None:
    """Nothing is left to flush after `| head`, either, which would give the process another exit code."""
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as stream:
        console = PlainConsole(3, stream)
        os.close(reads)
        for _ in range(3):
            console.message("to nobody")


# -- the live panel ----------------------------------------------------------------------------------------------------


def make_live(clock: Clock | None = None) -> tuple[LiveConsole, Target]:
    target = Target(record=True, width=80, height=24, file=io.StringIO())
    progress = Progress(total_steps=120, clock=clock or Clock())
    return LiveConsole(progress, Path.cwd() / "runs" / "first", target), target


def rendered(live: LiveConsole, target: Target) -> str:
    """Return the panel as text, with runs of blanks and the frame taken out."""
    live.close()
    target.export_text(clear=True)
    target.print(live.panel())
    return "\n".join(" ".join(line.strip("│").split()) for line in target.export_text().splitlines())


def test_the_start_shows_what_goes_on_and_for_how_long() -> None:
    clock = Clock()
    live, target = make_live(clock)
    live.stage("starting Ray")
    clock.seconds = 5
    live.stage("starting replicas")
    with live.during("loading vLLM"), live.during("warm-up") as show:
        clock.seconds = 31
        show("150/600")
        text = rendered(live, target)
        assert "starting replicas 0:26\nloading vLLM 0:26\nwarm-up 150/600 0:26" in text
        assert "starting Ray" not in text and "step 0/120 0:31 ETA -" in text
        target.export_text(clear=True)
    live.stage("training")
    assert target.export_text().splitlines() == ["warm-up: 0:26", "loading vLLM: 0:26", "starting replicas: 0:26"]


def test_live_panel_of_a_run() -> None:
    clock = Clock()
    live, target = make_live(clock)
    replicas = [ReplicaView("replica-0", "READY", 3), ReplicaView("replica-1", "SYNCING", -1)]
    live.watch(lambda: replicas)
    live.stage("training [1/2]")
    live.evaluation(0, 0.142)
    for step, reward in enumerate([0.0, 0.2, 0.4123], start=1):
        clock.seconds += 1
        live.step(step, METRICS | {"critic/rewards/mean": reward, "actor/kl_loss": 0.5})
    assert "held-out 0.142\n" in rendered(live, target)
    live.evaluation(3, 0.31)
    text = rendered(live, target)
    assert "slipstream runs/first" in text
    assert "training [1/2]" in text and "step 3/120 0:03 ETA 1:57" in text
    assert "reward 0.412 ▁▄█ held-out 0.142 -> 0.310" in text
    assert "loss -0.0123 grad norm 0.789" in text
    assert "KL 0.0012 reference 0.500 entropy 0.456" in text
    assert "length mean 21 max 32 staleness mean 1.20 max 2" in text
    assert "generated 3,412 tok/s trained 1,205 tok/s" in text
    assert "idle trainer 12% replicas 30% pause 6.1 ms" in text
    assert "queue 5 ready 8 in flight step 0.31 s" in text
    assert "replicas replica-0 READY v3 replica-1 SYNCING" in text


def test_the_panel_fits_a_small_terminal_uncut() -> None:
    live, target = make_live()
    live.stage("evaluating after the last step")
    live.watch(lambda: [ReplicaView(f"replica-{index}", "DRAINING", 1000) for index in range(3)])
    live.evaluation(0, 0.142)
    for step in range(1, 30):
        live.step(step, METRICS | {"critic/rewards/mean": -step / 30, "actor/kl_loss": 0.5})
    lines = rendered(live, target).splitlines()
    assert len(lines) <= 14 and not any("…" in line for line in lines)


def test_many_replicas_are_counted_and_dead_ones_always() -> None:
    ready, dead = ReplicaView("replica-0", "READY", 7), ReplicaView("replica-1", "DEAD", 3, is_dead=True)
    assert replica_text([]) == "-"
    assert replica_text([dead, ready, dead]) == "replica-0 READY v7  2 DEAD"
    assert replica_text([*[ready] * 5, ReplicaView("replica-9", "STARTING", -1), dead]) == (
        "5 READY v7  1 STARTING  1 DEAD"
    )


def test_live_messages_are_printed_literally_and_the_last_state_stays() -> None:
    live, target = make_live()
    live.message("wandb failed [red]really[/red]")
    live.stage("evaluating")
    live.step(120, METRICS)
    live.end("finished", "held-out accuracy 0.1 -> 0.9")
    live.close()
    text = target.export_text()
    assert text.startswith("wandb failed [red]really[/red]\nevaluating: 0:00\n")
    assert text.count("step 120/120") == 1 and "│ finished" in text and "ETA" not in text
    assert text.endswith("held-out accuracy 0.1 -> 0.9\n") and text.count("╯") == 1
    assert text.index("╯") < text.index("held-out accuracy 0.1"), "below the last frame"


def test_sparkline_shows_the_latest_finite_values_from_lowest_to_highest() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.5, 0.5, math.nan]) == "▁▁"
    assert sparkline([99.0] * 9 + [0.0] * 10 + [0, 1, 2, 3, 4, 5, 6, 7]) == "▁" * 8 + "▁▂▃▄▅▆▇█"
