"""wandb gets the metrics when it works, and cannot hurt a run when it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainer.tracking import wandb_sink
from trainer.tracking.sinks import FailedWrites, JsonlSink, Tracker, read_metrics
from trainer.tracking.wandb_sink import WandbSink


@dataclass
class FakeRun:
    """A wandb run that writes down what it is given. It has lost its helper process, or hangs until `goes_on`."""

    fails: bool = False
    goes_on: threading.Event | None = None
    logged: list[dict[str, float]] = field(default_factory=list)
    calls: int = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, data: Mapping[str, float]) -> None:
        self.calls += 1
        if self.goes_on is not None:
            assert self.goes_on.wait(10)
        if self.fails:
            raise ConnectionResetError("Connection lost")
        self.logged.append(dict(data))

    def finish(self, exit_code: int) -> None:
        pass


def start(run_dir: Path, mode: str = "offline") -> tuple[Tracker, list[str]]:
    """wandb and a file; what the console is told."""
    said: list[str] = []
    sinks = [WandbSink(run_dir, mode, "p", None, {}), JsonlSink(run_dir / "metrics.jsonl")]
    return Tracker(sinks, FailedWrites(said.append)), said


@pytest.fixture
def quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.teardown", lambda exit_code: None)


def steps_on_disk(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir / "metrics.jsonl")]


def test_wandb_failing_to_start_is_said_once_and_the_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.errors import UsageError  # noqa: PLC0415  (wandb takes a second: for its tests alone, here and below)

    def fail(**_: object) -> None:
        raise UsageError("no API key configured")

    monkeypatch.setattr("wandb.init", fail)
    tracker, said = start(tmp_path, "online")
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 2.0})
    tracker.close(0)
    assert steps_on_disk(tmp_path) == [1, 2]
    assert said == [
        "wandb cannot be written, the training goes on: wandb failed while starting: UsageError: no API key configured"
    ]
    assert tracker.failed.counts == {"wandb": 3}, "two records and the end"


def test_wandb_that_hangs_at_the_start_holds_nothing_up_past_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("wandb.init", lambda **_: goes_on.wait(10))
    monkeypatch.setattr(wandb_sink, "START_SECONDS", 0.05)
    started = time.monotonic()
    tracker, said = start(tmp_path, "online")
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 1.0})
    assert time.monotonic() - started < 5
    assert steps_on_disk(tmp_path) == [1, 2]
    assert said == ["wandb cannot be written, the training goes on: starting has taken more than 0.05 s"]
    tracker.close(0)
    assert time.monotonic() - started < 5 and tracker.failed.counts == {"wandb": 3}
    goes_on.set()


def test_the_start_has_a_deadline_of_wandbs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_end: None
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("wandb.init", lambda **arguments: given.update(arguments) or FakeRun())
    start(tmp_path)[0].close(0)
    assert (given["settings"].init_timeout, given["settings"].finish_timeout) == (30, 120)


def test_wandb_failing_to_log_is_said_once_and_the_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(fails=True)
    monkeypatch.setattr("wandb.init", lambda **_: run)
    tracker, said = start(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"a": 1.0})
    tracker.close(0)
    assert steps_on_disk(tmp_path) == [1, 2, 3]
    assert run.calls == 1
    (sentence,) = said
    assert "while logging step 1" in sentence and "ConnectionResetError: Connection lost" in sentence


def test_wandb_that_hangs_while_logging_gets_what_comes_meanwhile_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_end: None
) -> None:
    run = FakeRun(goes_on=threading.Event())
    assert run.goes_on is not None
    monkeypatch.setattr("wandb.init", lambda **_: run)
    tracker, said = start(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"a": 1.0})
    assert steps_on_disk(tmp_path) == [1, 2, 3] and run.logged == []
    run.goes_on.set()
    tracker.close(0)
    assert [record["global_steps"] for record in run.logged] == [1, 2, 3] and said == []


def test_wandb_that_hangs_at_the_end_holds_nothing_up_past_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("wandb.init", lambda **_: FakeRun(goes_on=goes_on))
    monkeypatch.setattr(wandb_sink, "FINISH_SECONDS", -9.9)
    tracker, said = start(tmp_path)
    tracker.log(1, {"a": 1.0})
    tracker.close(0)
    assert said == ["wandb cannot be written, the training goes on: finishing has taken more than 0.1 s"]
    goes_on.set()


def test_a_resumed_run_goes_on_under_its_id_and_logs_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_end: None
) -> None:
    run, ids = FakeRun(), []
    monkeypatch.setattr("wandb.init", lambda id, resume, **_: ids.append((id, resume)) or run)
    first, _ = start(tmp_path)
    for step, key in [(0, "eval/accuracy"), (1, "a"), (2, "a"), (3, "a"), (2, "eval/accuracy"), (4, "a")]:
        first.log(step, {key: 1.0})
    first.close(1)
    for _ in range(2):  # from a checkpoint of step 2, and killed again after the next
        again, said = start(tmp_path)
        again.log(3, {"a": 1.0})
        again.log(2, {"eval/accuracy": 1.0})
        again.close(1)
        assert said == []
    last, _ = start(tmp_path)
    for step, key in [(3, "a"), (4, "a"), (5, "a"), (4, "eval/accuracy")]:
        last.log(step, {key: 2.0})
    last.close(0)
    assert len(set(ids)) == 1 and len(ids) == 4 and ids[0][1] == "allow"
    sent = [(record["global_steps"], "eval/accuracy" in record) for record in run.logged]
    assert sent == [(0, True), (1, False), (2, False), (3, False), (2, True), (4, False), (5, False), (4, True)]
