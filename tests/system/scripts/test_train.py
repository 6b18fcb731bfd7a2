"""The command line: what is refused, when, and what is left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.staleness import StalenessWindow
from scripts.command.bookkeeping import point_latest_at
from scripts.command.command import first_error
from tests.support.paths import ROOT

AT_EXIT = """
import atexit, sys
atexit.register(lambda: print("imported:", *sorted({"ray", "torch", "vllm", "wandb"} & set(sys.modules))))
from scripts.train import main
main()
"""


class Ended:
    """A finished `slipstream-train` in a folder of its own."""

    def __init__(self, folder: Path, *arguments: str):
        command = [sys.executable, "-c", AT_EXIT, *arguments, f"hydra.run.dir={folder}/run"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        self.code, self.errors = done.returncode, done.stderr
        self.output, _, imported = done.stdout.rpartition("imported:")
        self.imported = imported.split()


def test_the_first_error_of_a_run_is_unwrapped_from_all_its_groups() -> None:
    first = OSError("first")
    nested = ExceptionGroup("", [ExceptionGroup("", [first, ValueError("later")]), KeyError("later still")])
    assert first_error(nested) is first
    assert first_error(first) is first
    assert first_error(BaseExceptionGroup("", [nested])) is first


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("trainer.lrr=1", ["trainer.lrr=1", "no such key", "did you mean trainer.lr"]),
        ("rollout.top_p=1.5", ["rollout.top_p=1.5", "must be between 1e-06 and 1"]),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_heavy_is_imported(
    argument: str, words: list[str], tmp_path: Path
) -> None:
    ended = Ended(tmp_path, argument)
    assert ended.code == 1
    assert [word for word in words if word not in ended.errors] == [], ended.errors
    assert "Traceback" not in ended.errors
    assert ended.imported == []


@pytest.mark.slow
def test_a_dry_run_tells_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    window = StalenessWindow(groups_per_step=10, max_staleness=3, update_interval=2)
    sizes = ("trainer.prompts_per_step=10", "rollout.max_staleness=3", "weight_sync.interval=2")
    ended = Ended(tmp_path, "dry_run=true", "device=cpu", "rollout.num_replicas=3", *sizes)
    assert (ended.code, ended.errors) == (0, "")
    plan = dict(line.strip().split(": ", 1) for line in ended.output.splitlines())
    assert plan["replicas"].startswith("3 x vLLM float32 on CPU")
    assert plan["claims"] == "5 CPU"
    assert plan["staleness"] == f"at most 3 versions ({window.capacity} slots), then wait"
    assert plan["run folder"] == f"{tmp_path}/run"
    assert ended.imported == ["ray"]  # for the resources, not started
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_output_that_is_not_utf8_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ended = Ended(tmp_path, "dry_run=true", "device=cpu", "data.val_files='Größe.jsonl'", "data.train_files='a.jsonl'")
    assert (ended.code, ended.errors) == (0, "")
    assert "held out: Gr\\xf6\\xdfe.jsonl" in ended.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--help"],
            ["slipstream train --help SECTION", "  * arithmetic ", "    gsm8k ", "\n  weight_sync "],
        ),
        (["--cfg", "job", "trainer.lr=0.125"], ["  lr: 0.125\n", "  max_staleness: 2\n"]),
    ],
)
def test_help_and_the_resolved_config_are_shown_without_imports_or_a_folder(
    arguments: list[str], expected: list[str], tmp_path: Path
) -> None:
    ended = Ended(tmp_path, *arguments)
    assert (ended.code, ended.imported) == (0, [])
    assert [words for words in expected if words not in ended.output] == []
    assert list(tmp_path.iterdir()) == []


def test_latest_points_at_the_newest_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        assert point_latest_at(tmp_path / name, beside=tmp_path / name) == []
        assert (tmp_path / "latest").resolve() == tmp_path / name
    assert os.readlink(tmp_path / "latest") == "second"  # relative: runs/ can be moved
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest", "second"]


def test_in_a_sweep_latest_stands_beside_the_sweep_and_a_folder_of_that_name_stays(tmp_path: Path) -> None:
    (tmp_path / "sweep" / "0").mkdir(parents=True)
    assert point_latest_at(tmp_path / "sweep" / "0", beside=tmp_path / "sweep") == []
    assert os.readlink(tmp_path / "latest") == "sweep/0"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    (told,) = point_latest_at(tmp_path / "sweep" / "0", beside=tmp_path / "sweep")
    assert told.startswith(f"{tmp_path}/latest is no link, and stays as it is")
    assert (tmp_path / "latest").is_dir() and not (tmp_path / "latest").is_symlink()
