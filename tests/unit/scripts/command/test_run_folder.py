"""Two drivers are never in one folder, and a dead one keeps nobody out."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import pytest

from configs.validate import ConfigError
from scripts.command import run_folder
from scripts.command.run_folder import LOCK_FILE, Holder, locked
from tests.support.paths import ROOT

HOLDS = """
import sys, time
from pathlib import Path
from scripts.command.run_folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


@contextmanager
def another_process(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """It holds the folder until it is killed."""
    command = [sys.executable, "-c", HOLDS, str(run_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_process_is_refused_in_one_line_until_the_first_is_gone(tmp_path: Path) -> None:
    with another_process(tmp_path) as first:
        with pytest.raises(ConfigError) as refused, locked(tmp_path):
            pass
        line = str(refused.value)
        assert line.startswith(f"hydra.run.dir={tmp_path}: process {first.pid} on {os.uname().nodename}, since 2")
        assert "\n" not in line and line.endswith("writes into it; end that first, or name another folder")
        first.send_signal(signal.SIGKILL)
        first.wait()
        with locked(tmp_path):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert (tmp_path / LOCK_FILE).read_text() == ""
    with locked(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} on"), locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({}, "writes into it; end that first"),
        ({"pid": 2**22 + 1}, None),
        ({"started": 1.0}, None),
        ({"boot_id": "before the machine started again"}, None),
        ({"host": "node-7"}, f"process .* on node-7, .*if it has ended, remove .*{LOCK_FILE}"),
    ],
    ids=["it lives", "no such process", "its id is another's", "the machine started again", "another host"],
)
def test_what_a_killed_process_left_is_told_from_one_that_may_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], refusal: str | None
) -> None:
    """The file system knows no flock."""

    def unknown(*_: object) -> None:
        raise OSError(run_folder.NO_LOCKS_HERE[0], "Function not implemented")

    monkeypatch.setattr(run_folder.fcntl, "flock", unknown)
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(replace(Holder.this_process(), **change))))
    if refusal is None:
        with locked(tmp_path):
            pass
    else:
        with pytest.raises(ConfigError, match=refusal), locked(tmp_path):
            pass
        (tmp_path / LOCK_FILE).unlink()  # as the message says
        with locked(tmp_path):
            pass


def left_by(run_dir: Path, **change: object) -> None:
    (run_dir / LOCK_FILE).write_text(json.dumps(asdict(replace(Holder.this_process(), **change))))


@dataclass(frozen=True)
class Mount:
    fstype: str
    opts: str
    mountpoint: str = "/"


@pytest.mark.parametrize(
    ("fstype", "opts", "is_trusted"),
    [
        ("nfs4", "rw,vers=4.2,local_lock=none", True),
        ("lustre", "rw,flock", True),
        ("ceph", "rw", True),
        ("overlay", "rw", True),
        ("nfs", "rw,vers=3,local_lock=none", False),
        ("lustre", "rw,localflock", False),
        ("fuse.gcsfuse", "rw", False),
        ("9p", "rw", False),
    ],
)
def test_on_file_systems_whose_locks_may_end_at_a_host_the_text_of_another_host_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fstype: str, opts: str, is_trusted: bool
) -> None:
    mounts = [Mount("ext4", "rw"), Mount(fstype, opts, str(tmp_path)), Mount("tmpfs", "rw", str(tmp_path / "other"))]
    monkeypatch.setattr(run_folder.psutil, "disk_partitions", lambda all: mounts)
    left_by(tmp_path, host="node-7")
    if is_trusted:
        with locked(tmp_path):
            pass
    else:
        with pytest.raises(ConfigError, match=f"on node-7, .*remove .*{LOCK_FILE}"), locked(tmp_path):
            pass
    left_by(tmp_path)
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("job", "restarts", "is_refused"), [("4711", 2, False), ("4711", 3, True), ("4712", 0, True), ("", 0, True)]
)
def test_a_slurm_job_that_was_queued_again_goes_on_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, restarts: int, is_refused: bool
) -> None:
    """Of another job, or beside this one, nothing is known."""
    monkeypatch.setattr(run_folder.psutil, "disk_partitions", lambda all: [Mount("beegfs", "rw")])
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    left_by(tmp_path, host="node-7", slurm_job=job, slurm_restarts=restarts)
    with pytest.raises(ConfigError, match="on node-7") if is_refused else nullcontext(), locked(tmp_path):
        pass


def test_a_killed_process_whose_parent_has_not_looked_yet_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        started = psutil.Process(process.pid).create_time()
        holder = replace(Holder.this_process(), pid=process.pid, started=started)
        assert not holder.has_ended
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE and holder.has_ended


@pytest.mark.parametrize("text", ['{"host": "no', "[" * 100_000, "[]", '{"who": 1}'], ids=lambda text: text[:12])
def test_a_lock_file_that_was_half_written_keeps_nobody_out(text: str, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    with locked(tmp_path):
        pass
