"""wandb gets the metrics when it works, and cannot hurt a run when it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from configs.schema import WandbConfig
from trainer.tracking.sinks import FailedWrites, JsonlSink, Tracker, read_metrics
from trainer.tracking.wandb import sink as wandb_sink
from trainer.tracking.wandb.sink import WandbSink


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


class Scene:
    """wandb, or what stands for it, and a file."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch):
        self.run_dir = run_dir
        self.patch = monkeypatch
        self.run = FakeRun()
        self.said: list[str] = []
        monkeypatch.setattr("wandb.init", lambda **_: self.run)
        monkeypatch.setattr("wandb.teardown", lambda exit_code: None)

    def start(self, *steps: int) -> Tracker:
        sinks = [WandbSink(self.run_dir, WandbConfig(), {}), JsonlSink(self.run_dir / "metrics.jsonl")]
        tracker = Tracker(sinks, FailedWrites(self.said.append))
        for step in steps:
            tracker.log(step, {"a": 1.0})
        return tracker

    @property
    def on_disk(self) -> list[int]:
        return [record["step"] for record in read_metrics(self.run_dir / "metrics.jsonl")]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_wandb_failing_to_start_is_said_once_and_the_file_goes_on(scene: Scene) -> None:
    from wandb.errors import UsageError  # noqa: PLC0415  (wandb takes a second: for its tests alone, here and below)

    def fail(**_: object) -> None:
        raise UsageError("no API key configured")

    scene.patch.setattr("wandb.init", fail)
    tracker = scene.start(1, 2)
    tracker.close(0)
    assert scene.on_disk == [1, 2]
    assert scene.said == [
        "wandb cannot be written, the training goes on: wandb failed while starting: UsageError: no API key configured"
    ]
    assert tracker.failed.counts == {"wandb": 3}, "two records and the end"


def test_a_login_that_a_person_breaks_off_loses_no_record_in_silence(scene: Scene) -> None:
    def broken_off(**_: object) -> None:
        raise KeyboardInterrupt

    scene.patch.setattr("wandb.init", broken_off)
    tracker = scene.start(1, 2)
    tracker.close(0)
    assert scene.on_disk == [1, 2] and tracker.failed.counts == {"wandb": 3}
    assert "wandb failed while starting: KeyboardInterrupt" in scene.said[0]


def test_wandb_that_hangs_at_the_start_holds_nothing_up_past_its_deadline(scene: Scene) -> None:
    goes_on = threading.Event()
    scene.patch.setattr("wandb.init", lambda **_: goes_on.wait(10))
    scene.patch.setattr(wandb_sink, "START_SECONDS", 0.05)
    started = time.monotonic()
    tracker = scene.start(1, 2)
    tracker.close(0)
    assert time.monotonic() - started < 5
    assert scene.on_disk == [1, 2] and tracker.failed.counts == {"wandb": 3}
    assert scene.said == ["wandb cannot be written, the training goes on: starting has taken more than 0.05 s"]
    goes_on.set()


def test_the_start_has_a_deadline_of_wandbs_own(scene: Scene) -> None:
    given: dict[str, Any] = {}
    scene.patch.setattr("wandb.init", lambda **arguments: given.update(arguments) or FakeRun())
    scene.start().close(0)
    assert (given["settings"].init_timeout, given["settings"].finish_timeout) == (30, 120)


def test_wandb_failing_to_log_is_said_once_and_the_file_goes_on(scene: Scene) -> None:
    scene.run.fails = True
    scene.start(1, 2, 3).close(0)
    assert scene.on_disk == [1, 2, 3]
    assert scene.run.calls == 1
    (sentence,) = scene.said
    assert "while logging step 1" in sentence and "ConnectionResetError: Connection lost" in sentence


def test_wandb_that_hangs_while_logging_gets_what_comes_meanwhile_when_it_is_back(scene: Scene) -> None:
    scene.run.goes_on = threading.Event()
    tracker = scene.start(1, 2, 3)
    assert scene.on_disk == [1, 2, 3] and scene.run.logged == []
    scene.run.goes_on.set()
    tracker.close(0)
    assert [record["global_steps"] for record in scene.run.logged] == [1, 2, 3] and scene.said == []


def test_wandb_that_hangs_for_long_is_said_once_and_gets_all_when_it_is_back(scene: Scene) -> None:
    scene.run.goes_on = threading.Event()
    tracker = scene.start(1)
    scene.patch.setattr(wandb_sink, "START_SECONDS", 0.05)
    time.sleep(0.1)
    tracker.log(2, {"a": 1.0})
    tracker.log(3, {"a": 1.0})
    assert tracker.failed.counts == {"wandb": 2}
    assert scene.said == ["wandb cannot be written, the training goes on: logging step 1 has taken more than 0.05 s"]
    scene.run.goes_on.set()
    time.sleep(0.2)
    tracker.close(0)
    assert [record["global_steps"] for record in scene.run.logged] == [1, 2, 3]


def test_wandb_that_hangs_at_the_end_holds_nothing_up_past_its_deadline(scene: Scene) -> None:
    scene.run.goes_on = threading.Event()
    scene.patch.setattr(wandb_sink, "FINISH_SECONDS", -9.9)
    scene.start(1).close(0)
    assert scene.said == ["wandb cannot be written, the training goes on: finishing has taken more than 0.1 s"]
    scene.run.goes_on.set()


def test_a_resumed_run_goes_on_under_its_id_and_logs_no_step_twice(scene: Scene) -> None:
    ids: list[tuple[str, str]] = []
    scene.patch.setattr("wandb.init", lambda id, resume, **_: ids.append((id, resume)) or scene.run)
    first = scene.start()
    for step, key in [(0, "eval/accuracy"), (1, "a"), (2, "a"), (3, "a"), (2, "eval/accuracy"), (4, "a")]:
        first.log(step, {key: 1.0})
    first.close(1)
    for _ in range(2):  # from a checkpoint of step 2, and killed again after the next
        again = scene.start(3)
        again.log(2, {"eval/accuracy": 1.0})
        again.close(1)
    last = scene.start(3, 4, 5)
    last.log(4, {"eval/accuracy": 2.0})
    last.close(0)
    assert len(set(ids)) == 1 and len(ids) == 4 and ids[0][1] == "allow" and scene.said == []
    sent = [(record["global_steps"], "eval/accuracy" in record) for record in scene.run.logged]
    assert sent == [(0, True), (1, False), (2, False), (3, False), (2, True), (4, False), (5, False), (4, True)]


def test_a_run_that_continues_another_folder_names_it_and_is_in_its_group(tmp_path: Path, scene: Scene) -> None:
    given: list[dict[str, Any]] = []
    scene.patch.setattr("wandb.init", lambda **arguments: given.append(arguments) or FakeRun())

    def run(folder: str, wandb: WandbConfig, continues: str | None = None) -> None:
        before = None if continues is None else tmp_path / continues
        sink = WandbSink(tmp_path / folder, wandb, {"seed": 3}, before)
        sink.log(1, {"a": 1.0})
        sink.close(0)

    run("first", WandbConfig(group="lr", tags=["small"], entity="us", name="one"))
    run("longer", WandbConfig(), "first")
    run("longer", WandbConfig(), "longer")  # after a kill
    run("other", WandbConfig(group="other"), "longer")
    run("alone", WandbConfig(), "never_logged_to_wandb")
    shown = [(one["name"], one["group"], one["tags"], one["entity"]) for one in given]
    assert shown[0] == ("one", "lr", ["small"], "us")
    assert [name for name, *_ in shown[1:]] == ["longer", "longer", "other", "alone"]
    assert [group for _, group, *_ in shown[1:]] == ["lr", "lr", "other", None]
    first, longer, again, other, alone = (one["config"].get("continues", {}).get("id") for one in given)
    assert (first, longer, again, other, alone) == (None, given[0]["id"], given[0]["id"], given[1]["id"], None)
    assert given[1]["id"] == given[2]["id"] != given[0]["id"]
