"""A command in a process of its own: its output, its errors, and its end with ours."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.validate import ConfigError
from scripts.api import process
from scripts.api.child import run
from scripts.api.commands import serve, train
from scripts.api.process import CommandProcess
from tests.support.import_name import install_into
from tests.support.paths import ROOT

STAND_IN = "tests.support.stand_in_command"


def test_ctrl_c_stops_the_command_once_and_is_raised_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "CHILD", STAND_IN)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            CommandProcess("interrupted", []).wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("ünder way\nstopped", "told")


def test_a_process_that_is_killed_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHILD", STAND_IN)
    assert CommandProcess("killed", []).wait().error == "the process of the command ended: killed by SIGKILL"


def test_another_exception_stops_the_command_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHILD", STAND_IN)
    command = CommandProcess("endless", [])
    looks: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        time.sleep(0.05)
        if len(looks) == 2:
            raise RuntimeError("alarm")

    monkeypatch.setattr(command, "look", look)
    with pytest.raises(RuntimeError, match="alarm"):
        command.wait()
    assert not command.is_alive


def test_a_server_writes_as_much_as_it_likes_while_its_owner_does_other_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "CHILD", STAND_IN)
    with serve(run_dir=tmp_path / "run") as server:
        assert server.url == "http://127.0.0.1:1"
        for _ in range(600):
            if (server.run_dir / "written").exists():
                break
            time.sleep(0.1)
        else:
            raise AssertionError("its pipe is full")
    assert capsys.readouterr().out.count("x") == 2**20


def test_a_command_ends_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    code = (
        "import os; from scripts.api import process; process.CHILD = os.environ['STAND_IN']\n"
        "process.CommandProcess('orphan', [os.environ['MADE']]); os._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STAND_IN": STAND_IN, "MADE": str(tmp_path / "made")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
    for _ in range(600):
        if (tmp_path / "made").exists():
            return
        time.sleep(0.1)
    raise AssertionError("it lives on")


def test_the_child_runs_the_command_and_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run("train", ["dry_run=true", "device=cpu"])
    assert (outcome.exit_code, outcome.carried) == (0, None) and "run folder: " in capsys.readouterr().out
    assert outcome.run_dir is not None and outcome.run_dir.parent == tmp_path / "runs"
    refused = run("train", ["trainer.lr=-1"])
    assert refused.carried is not None and refused.error.startswith("config error: trainer.lr=-1")
    assert isinstance(refused.carried.unpacked("there"), ConfigError)
    for line, why in (
        (["-m", "seed=1,2"], "only the command line takes options and sweeps"),
        (["seed"], "seed: must be"),
    ):
        assert why in run("train", line).error


@pytest.mark.slow
def test_a_plan_from_python_reaches_the_output_and_its_refusal_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, with the process of the command: a lambda goes pickled into it."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{number}?", "answer": str(number)} for number in range(9)]
    result = train(data=rows, reward=lambda prompt, text: 0.5, device="cpu", dry_run=True)
    assert result.summary == {} and "reward runs.functions.function_" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="(?s)no column 'answer'.*the process of the command"):
        train(data=[{"question": "1?"}], reward=lambda prompt, text: 0.5, device="cpu", dry_run=True)


def test_the_import_name_is_mapped_by_pyproject(tmp_path: Path) -> None:
    code = "import slipstream, sys; print(*slipstream.__all__, 'ray' in sys.modules, 'torch' in sys.modules)"
    environment = install_into(tmp_path)
    command = [sys.executable, "-P", "-c", code]
    shown = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    *names, ray, torch = shown.stdout.split()
    assert {"train", "evaluate", "sft", "serve", "reward", "tool", "environment"} <= set(names)
    assert (ray, torch) == ("False", "False")
