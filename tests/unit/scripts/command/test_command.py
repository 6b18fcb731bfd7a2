"""A command from its arguments to its exit code and its files, with a job that does nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.data.sources import DataError
from scripts.command.bookkeeping import failure
from scripts.command.command import FAILED, Ended, Invocation, Main
from tests.support.paths import ROOT

JOB = """
import sys
from scripts.command.command import Ended, Main

def job(given):
    lr, seed = given.config.trainer.lr, given.config.seed
    (given.run_dir / "ran.txt").write_text(f"{lr} {seed}")
    if seed == 7:
        raise RuntimeError("this job was made to fail")
    if seed == 8:
        raise KeyboardInterrupt
    if seed == 3:
        return Ended(exit_code=3, accuracy=lr, error="what is missing")
    if seed == 9:
        sys.exit(0)
    return Ended(exit_code=0, accuracy=lr)

sys.exit(Main(name="train", command=job).run(sys.argv[1:]))
"""


def ended(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}
    command = [sys.executable, "-c", JOB, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def in_sweep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ended(folder, "hydra.sweep.dir=sweep", "-m", *arguments)


@pytest.mark.slow
def test_a_sweep_runs_every_job_in_a_folder_of_its_own_and_ends_with_a_table(tmp_path: Path) -> None:
    done = in_sweep(tmp_path, "trainer.lr=0.25,0.5", "seed=1,2", "trainer.total_steps=4")
    assert (done.returncode, done.stderr) == (0, "")
    ran = [(tmp_path / "sweep" / str(number) / "ran.txt").read_text() for number in range(4)]
    assert ran == ["0.25 1", "0.25 2", "0.5 1", "0.5 2"]
    *_, head, first, _, _, last, file = done.stdout.splitlines()
    assert head.split() == ["job", "overrides", "accuracy", "seconds", "status"]
    assert first.split() == ["0", "trainer.lr=0.25", "seed=1", "0.2500", "0", "finished"]
    assert last.split() == ["3", "trainer.lr=0.5", "seed=2", "0.5000", "0", "finished"]
    written = json.loads(Path(file).read_text())
    assert file == f"{tmp_path}/sweep/sweep.json"
    assert [job["accuracy"] for job in written] == [0.25, 0.25, 0.5, 0.5]
    assert written[0]["overrides"] == ["trainer.lr=0.25", "seed=1", "trainer.total_steps=4"]


@pytest.mark.slow
def test_a_job_that_fails_exits_or_is_unproven_hides_nothing_and_stops_no_other(tmp_path: Path) -> None:
    done = in_sweep(tmp_path, "seed=7,9,3,1")
    assert done.returncode == 1
    jobs = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [(job["status"], job["error"]) for job in jobs] == [
        ("failed", "RuntimeError: this job was made to fail"),
        ("failed", "SystemExit: 0"),
        ("unproven", "what is missing"),
        ("finished", ""),
    ]
    assert "RuntimeError: this job was made to fail" in done.stdout and "Traceback" not in done.stderr
    assert in_sweep(tmp_path, "seed=3,1").returncode == 1


@pytest.mark.slow
def test_jobs_of_an_earlier_sweep_in_the_folder_are_none_of_this_one(tmp_path: Path) -> None:
    in_sweep(tmp_path, "seed=1,2,4")
    assert in_sweep(tmp_path, "seed=1,2").returncode == 0
    assert len(json.loads((tmp_path / "sweep" / "sweep.json").read_text())) == 2


@pytest.mark.slow
def test_ctrl_c_ends_the_sweep_and_the_table_says_what_did_not_run(tmp_path: Path) -> None:
    done = in_sweep(tmp_path, "seed=1,8,2")
    assert done.returncode == 130
    jobs = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [job["status"] for job in jobs] == ["finished", "stopped", "not run"]
    assert jobs[2]["overrides"] == ["seed=2"] and not (tmp_path / "sweep" / "2").exists()


def test_a_sweep_with_a_wrong_value_is_refused_before_its_first_job(tmp_path: Path) -> None:
    done = in_sweep(tmp_path, "trainer.lr=0.1,2.0")
    assert (done.returncode, done.stderr) == (1, "config error: trainer.lr=2.0: must be between 0 and 1\n")
    assert list(tmp_path.iterdir()) == []


def test_one_run_has_its_exit_code_and_its_folder(tmp_path: Path) -> None:
    for number, (seed, code) in enumerate([(1, 0), (7, 1), (8, 130), (9, 1)]):
        done = ended(tmp_path, f"hydra.run.dir=run {number}", f"seed={seed}")
        assert done.returncode == code, done.stderr
        assert (tmp_path / f"run {number}" / "ran.txt").read_text() == f"3e-05 {seed}"
        assert not list(tmp_path.rglob("job.json"))


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("hydra.run.dir=", "hydra.run.dir=: must name a folder; to leave it out takes a new one under runs/"),
        ("hydra.run.dir=${oc.env:UNSET_VARIABLE}/x", "hydra.run.dir=${oc.env:UNSET_VARIABLE}/x: "),
        ("hydra.run.dir=file/run", "HERE/file/run: cannot be written: Not a directory"),
        ("resume=auto", "resume=auto: needs hydra.run.dir, because the default is a new folder each time"),
        ("runs/latest", "runs/latest: must be key=value, or one of the options"),
    ],
)
def test_a_folder_that_cannot_be_is_refused_before_there_is_one(
    argument: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert Main(name="train", command=never).run([argument]) == FAILED
    said = capsys.readouterr().err
    assert said.startswith("config error: ") and line.replace("HERE/", f"{tmp_path}/") in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def never(given: Invocation) -> Ended:
    raise AssertionError("this command line starts nothing")


def test_bad_data_ends_a_run_in_one_line_and_a_bug_with_its_traceback() -> None:
    ended, said = failure(DataError("rows.jsonl:3: not JSON"))
    assert (ended.exit_code, said) == (FAILED, "config error: rows.jsonl:3: not JSON\n")
    assert "\nfailed: RuntimeError: a bug\n" in failure(RuntimeError("a bug"))[1]


@pytest.mark.slow
def test_a_command_that_is_refused_leaves_the_folder_of_another_run_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run" / "hydra").mkdir(parents=True)
    (tmp_path / "run" / "hydra" / "overrides.yaml").write_text("- seed=1\n")
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    command = [sys.executable, "-m", "scripts.train", "hydra.run.dir=" + str(tmp_path / "run"), "seed=2", "device=cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "holds a run already" in done.stderr
    written = {path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*.yaml")}
    assert written == {"hydra/overrides.yaml"}
    assert (tmp_path / "run" / "hydra" / "overrides.yaml").read_text() == "- seed=1\n"


@pytest.mark.parametrize("dry", [["dry_run=true"], ["dry_run=true", "-m", "seed=1,2", "hydra.sweep.dir=sweep"]])
def test_what_runs_dry_makes_no_folder(dry: list[str], tmp_path: Path) -> None:
    done = ended(tmp_path, *dry)
    assert done.returncode == 1 and "No such file" in done.stderr, "this job writes, which a real one does not"
    assert list(tmp_path.iterdir()) == []
