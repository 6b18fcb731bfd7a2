"""wandb gets the metrics when it works, and cannot hurt a run when it does not."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.errors import UsageError

from trainer.tracking import JsonlSink, Tracker, WandbSink, read_metrics

ROOT = Path(__file__).parents[2]


class FailingRun:
    """A wandb run that lost its helper process."""

    def __init__(self) -> None:
        self.calls = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, data: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionResetError("Connection lost")


def steps_on_disk(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir / "metrics.jsonl")]


def test_wandb_failing_to_start_is_one_warning_and_the_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: object) -> None:
        raise UsageError("no API key configured")

    monkeypatch.setattr(wandb, "init", fail)
    tracker = Tracker([WandbSink(tmp_path, "online", "p", "n", {}), JsonlSink(tmp_path / "metrics.jsonl")])
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 2.0})
    tracker.close(0)
    assert steps_on_disk(tmp_path) == [1, 2]
    (message,) = caplog.messages
    assert "while starting" in message
    assert "no API key configured" in message


def test_wandb_failing_to_log_is_one_warning_and_the_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = FailingRun()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    tracker = Tracker([WandbSink(tmp_path, "offline", "p", None, {}), JsonlSink(tmp_path / "metrics.jsonl")])
    for step in (1, 2, 3):
        tracker.log(step, {"a": 1.0})
    tracker.close(0)
    assert steps_on_disk(tmp_path) == [1, 2, 3]
    assert run.calls == 1
    (message,) = caplog.messages
    assert "while logging step 1" in message
    assert "ConnectionResetError: Connection lost" in message


def test_disabled_wandb_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import, imported = builtins.__import__, []

    def recorded(name: str, *args: Any, **kwargs: Any) -> object:
        imported.append(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", recorded)
    sink = WandbSink(tmp_path, "disabled", "p", "n", {})
    sink.log(1, {"a": 1.0})
    sink.close(0)
    assert "wandb" not in imported
    assert not (tmp_path / "wandb").exists()


def test_an_unknown_wandb_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of offline, online, disabled, got 'offlin'"):
        WandbSink(tmp_path, "offlin", "p", "n", {})


OFFLINE_RUN = """
import os, sys
from pathlib import Path
from trainer.tracking import WandbSink

sink = WandbSink(Path(sys.argv[1]), "offline", "slipstream", "test", {"group_size": 8})
assert os.waitpid(-1, os.WNOHANG) == (0, 0), "wandb started no helper, so the check below would show nothing"
for step in (0, 1, 2, 1):
    sink.log(step, {"critic/rewards/mean": 0.1 * step, "nan": float("nan")})
sink.close(0)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:  # no child is left, not even a dead one
    sys.exit(0)
sys.exit("wandb's helper process outlives close()")
"""


def test_wandb_offline_writes_under_the_run_folder_quietly_and_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OFFLINE_RUN, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    written = file.read_bytes()
    assert b"critic/rewards/mean" in written
    assert b"group_size" in written
