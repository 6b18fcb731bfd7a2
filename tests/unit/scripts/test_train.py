"""Nothing that comes after the last step makes a failed run of one that trained to its end."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.schema import Config
from scripts.command import beside
from scripts.command.bookkeeping import point_latest_at
from scripts.command.command import STOPPED, UNPROVEN, Invocation
from scripts.command.ending import CommandLine
from scripts.train import conclude
from tests.support.recordings import Screen
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.sinks import Tracker

SUMMARY = {"accuracy_before": 0.1, "accuracy_after": 0.9, "steps": 4, "seconds": 1.0}


@dataclass
class EndScreen(Screen):
    said: list[str] = field(default_factory=list)

    def message(self, text: str) -> None:
        self.said.append(text)

    def end(self, state: str, text: str) -> None:
        self.said += [state, text]


def raises(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


def concluded(run_dir: Path) -> tuple[int, list[str]]:
    screen = EndScreen()
    given = CommandLine(run_dir=run_dir, overrides=(), sizes="tiny", python=Path("python"), folder=run_dir.parent)
    return conclude(given, SUMMARY, RunRecorder(run_dir, Tracker([]), screen), screen), screen.said


def test_a_curve_that_cannot_be_drawn_and_an_audit_that_cannot_be_made_are_said(tmp_path: Path) -> None:
    pytest.importorskip("scripts.audit", reason="this checkout has no wings")
    code, (curve, state, end) = concluded(tmp_path)
    assert (code, state) == (UNPROVEN, "finished") and curve.startswith("curve.png cannot be drawn: ")
    assert end.startswith("audit: failed: audit: ") and "0.100 -> 0.900 after 4 steps" in end


def test_a_checkout_without_the_commands_that_look_at_runs_trains_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, (curve, state, end) = concluded(tmp_path)
    assert (code, state) == (0, "finished") and curve.endswith("this checkout has no scripts/plot_curve.py")
    assert end.startswith("audit: none was made: this checkout has no scripts/audit.py\nfinished: ")


@pytest.mark.parametrize("name", ["draw_curve", "audit"])
def test_a_signal_meanwhile_stops_the_audit_and_not_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "draw_curve", lambda run_dir: None)
    monkeypatch.setattr(beside, name, raises(KeyboardInterrupt()))
    code, (state, end) = concluded(tmp_path)
    assert (code, state) == (STOPPED, "finished")
    assert "the training is whole" in end and f" audit {tmp_path.name}\n" in end and "go on" not in end


def test_a_folder_beside_which_no_link_can_be_made_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "symlink_to", raises(PermissionError(13, "Permission denied")))
    (told,) = point_latest_at(tmp_path / "run", beside=tmp_path / "run")
    assert told.startswith(f"{tmp_path}/latest does not point at this run: ") and "Permission denied" in told


def test_a_kill_while_the_config_is_written_leaves_none_that_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = OmegaConf.structured(Config())
    given = Invocation(config=Config(), composed=composed, run_dir=tmp_path, overrides=("seed=0",))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", raises(KeyboardInterrupt()))
        given.save_config()
    assert not (tmp_path / "config.yaml").exists()
    given.save_config()
    assert OmegaConf.load(tmp_path / "config.yaml") == OmegaConf.create(
        json.loads(json.dumps(OmegaConf.to_container(OmegaConf.structured(Config()), enum_to_str=True)))
    )
