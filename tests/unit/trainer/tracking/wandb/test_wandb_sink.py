"""Sending metrics to wandb works when wandb does, and cannot hurt a run when it does not."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from configs.schema import WandbConfig, WandbMode
from tests.support.recordings import example_advantages, example_groups
from trainer.supervised.demonstrations import Validation
from trainer.supervised.recorder import SupervisedRecorder
from trainer.tracking.console import PlainConsole
from trainer.tracking.samples import HISTOGRAMS, Sampler
from trainer.tracking.sinks import FailedWrites, JsonlSink, Tracker, read_metrics
from trainer.tracking.wandb import sink as wandb_sink
from trainer.tracking.wandb.sink import WandbSink


@dataclass
class FakeRun:
    """A wandb run that writes down what it is given. It has lost its helper process, or hangs until `goes_on`."""

    fails: bool = False
    goes_on: threading.Event | None = None
    logged: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    entity: str = "us"
    project: str = "math"

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, data: Mapping[str, Any]) -> None:
        self.calls += 1
        if self.goes_on is not None:
            assert self.goes_on.wait(10)
        if self.fails:
            raise ConnectionResetError("Connection lost")
        self.logged.append(dict(data))

    def finish(self, exit_code: int) -> None:
        pass


class Scene:
    """A sink of wandb, or of what stands for it, and a file beside it."""

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


def usage_error() -> Exception:
    from wandb.errors import UsageError  # noqa: PLC0415  (wandb takes a second: for its tests alone, here and below)

    return UsageError("no API key configured")


@pytest.mark.parametrize(
    ("error", "text"),
    [(usage_error, "UsageError: no API key configured"), (KeyboardInterrupt, "KeyboardInterrupt")],
    ids=["no key", "a login that a person breaks off"],
)
def test_wandb_failing_to_start_is_said_once_and_the_file_goes_on(
    error: Callable[[], BaseException], text: str, scene: Scene
) -> None:
    def fail(**_: object) -> None:
        raise error()

    scene.patch.setattr("wandb.init", fail)
    tracker = scene.start(1, 2)
    tracker.close(0)
    assert scene.on_disk == [1, 2]
    (sentence,) = scene.said
    expected = f"wandb cannot be written, the training goes on: wandb failed while starting: {text}"
    assert sentence.rstrip(": ") == expected
    assert tracker.failed.counts == {"wandb": 3}, "two records and the end"


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


def test_wandb_failing_to_log_is_said_once_and_the_file_goes_on(scene: Scene) -> None:
    scene.run.fails = True
    scene.start(1, 2, 3).close(0)
    assert scene.on_disk == [1, 2, 3]
    assert scene.run.calls == 1
    (sentence,) = scene.said
    assert "while logging step 1" in sentence and "ConnectionResetError: Connection lost" in sentence


class Metrics(dict[str, float]):
    """Metrics that can be referred to weakly."""


def test_what_is_logged_after_a_failure_is_not_kept_in_memory(scene: Scene) -> None:
    scene.run.fails = True
    tracker = scene.start(1)
    while not tracker.failed.counts:
        time.sleep(0.01)
        tracker.log(2, {"a": 1.0})
    logged: list[weakref.ref[Metrics]] = []
    for step in range(3, 9):
        metrics = Metrics(a=float(step))
        logged.append(weakref.ref(metrics))
        tracker.log(step, metrics)
    del metrics
    gc.collect()
    assert [reference() for reference in logged] == [None] * 6
    tracker.close(0)


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


def test_the_validations_of_a_supervised_run_come_after_the_step_that_they_are_of(scene: Scene) -> None:
    tracker = scene.start()
    recorder = SupervisedRecorder(scene.run_dir, tracker, PlainConsole(3, StringIO()))
    recorder.record_evaluation(0, Validation(3.0, 40, (0,)))
    for step in (1, 2):
        recorder.record_step(step, {"timing_s/step": 1.0, "timing_s/elapsed": 1.0, "perf/trained_tokens": 9.0}, [], [])
    recorder.record_evaluation(2, Validation(1.5, 40, (2,)))
    tracker.close(0)
    sent = [(record["global_steps"], record.get("eval/ce_loss")) for record in scene.run.logged]
    assert sent == [(0, 3.0), (1, None), (2, None), (2, 1.5)] and scene.said == []


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


# -- trajectories, axes and the saved view -----------------------------------------------------------------------------


def test_a_step_has_histograms_and_a_table_and_an_evaluation_the_time_of_the_latest_step(
    scene: Scene,
) -> None:
    samples = Sampler(interval=1, num_rows=2).take(7, example_groups(), example_advantages())
    tracker = scene.start()
    tracker.log(7, {"timing_s/elapsed": 12.5}, samples)
    tracker.log(5, {"eval/accuracy": 0.5})
    tracker.close(0)
    step, rows, evaluation = scene.run.logged
    assert (step["global_steps"], step["timing_s/elapsed"], set(HISTOGRAMS) <= set(step)) == (7, 12.5, True)
    assert step["distributions/staleness"].histogram == [4, 4, 1]
    shown = rows["samples/trajectories"]
    assert [dict(zip(shown.columns, row, strict=True))["versions"] for row in shown.data] == ["5: 0-2", "6: 0-2"]
    assert evaluation == {"global_steps": 5, "timing_s/elapsed": 12.5, "eval/accuracy": 0.5} and scene.said == []


def test_a_table_that_wandb_refuses_costs_the_tables_and_no_metric(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(samples: object) -> None:
        raise PermissionError("no artifacts here")

    monkeypatch.setattr(wandb_sink, "_table", refuse)
    samples = Sampler(interval=1, num_rows=2).take(7, example_groups(), example_advantages())
    tracker = scene.start()
    for step in (1, 2, 3):
        tracker.log(step, {"a": 1.0}, samples)
    tracker.close(0)
    assert [record["global_steps"] for record in scene.run.logged] == [1, 2, 3] and scene.said == []
    assert [record.getMessage() for record in caplog.records] == ["wandb: no tables of trajectories from step 1 on"]


ONLINE = WandbConfig(mode=WandbMode.online)


@pytest.mark.parametrize(
    ("config", "calls"),
    [(ONLINE, 1), (replace(ONLINE, workspace=False), 0), (WandbConfig(), 0)],
)
def test_the_view_is_made_in_online_mode_unless_the_config_says_no(
    scene: Scene, config: WandbConfig, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, str]] = []
    monkeypatch.setattr(wandb_sink, "ensure_workspace", lambda *where: made.append(where))
    WandbSink(scene.run_dir, config, {}).close(0)
    assert made == [("us", "math")] * calls


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'wandb_workspaces'"), "No module named 'wandb_workspaces'; pip install"),
        (RuntimeError("permission denied"), "wandb: no saved view in us/math"),
    ],
)
def test_a_view_that_cannot_be_made_is_only_logged(
    scene: Scene, error: Exception, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: str) -> None:
        raise error

    monkeypatch.setattr(wandb_sink, "ensure_workspace", fail)
    sink = WandbSink(scene.run_dir, ONLINE, {})
    sink.log(1, {"a": 1.0})
    sink.close(0)
    assert [record["global_steps"] for record in scene.run.logged] == [1]
    assert said in caplog.text


def test_a_view_that_hangs_holds_no_record_up_and_the_end_not_past_its_deadline(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(wandb_sink, "ensure_workspace", lambda *_: goes_on.wait(10))
    sink = WandbSink(scene.run_dir, ONLINE, {})
    sink.log(1, {"a": 1.0})
    monkeypatch.setattr(wandb_sink, "START_SECONDS", 0.2)
    started = time.monotonic()
    sink.close(0)
    assert time.monotonic() - started < 5 and [record["global_steps"] for record in scene.run.logged] == [1]
    goes_on.set()


def test_the_config_names_commit_and_hardware_and_files_of_tables_stay_in_the_run_folder(scene: Scene) -> None:
    given: dict[str, Any] = {}
    staging: list[str | None] = []

    def init(**arguments: Any) -> FakeRun:
        given.update(arguments)
        staging.append(os.environ.get("WANDB_DATA_DIR"))
        return FakeRun()

    scene.patch.setattr("wandb.init", init)
    scene.patch.delenv("WANDB_DATA_DIR", raising=False)
    scene.start().close(0)
    assert (given["settings"].init_timeout, given["settings"].finish_timeout) == (30, 120), "deadlines of wandb's own"
    machine = given["config"]["machine"]
    assert machine["cpus"] >= 1 and machine["memory_gib"] > 0 and "torch" in machine["packages"]
    assert re.fullmatch("[0-9a-f]{40}|unknown: .*", machine["commit"])
    assert staging == [str(scene.run_dir / "wandb" / "staging")] and "WANDB_DATA_DIR" not in os.environ
