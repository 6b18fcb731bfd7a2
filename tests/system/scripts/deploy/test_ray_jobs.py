"""`ray job submit` to a cluster that runs already: the run joins it, and finds the submitter's modules."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from scripts.command.run_folder import read_holder
from scripts.observe.audit import audit
from tests.support.paths import ROOT
from tests.support.whole_runs import END_DEADLINE_S, START_DEADLINE_S, small, steps_of, survivors

pytest.importorskip("ray.dashboard.optional_deps", reason="the extra `cluster` is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

RAY = (sys.executable, "-m", "ray.scripts.scripts")
REWARD = """
from helpers_of_mine import is_even

def score(prompt, text):
    return float(is_even(len(text)))
"""
HELPERS = """
def is_even(number):
    return number % 2 == 0
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass(frozen=True)
class Head:
    """A head of Ray with its job server."""

    url: str
    process: subprocess.Popen[bytes]

    def submit(self, folder: Path, *overrides: str) -> subprocess.Popen[str]:
        """Submit a training from the folder. The process prints what the job prints, and ends with it."""
        job = [sys.executable, "-m", "scripts.train", *overrides]
        command = [*RAY, "job", "submit", f"--address={self.url}", f"--working-dir={folder}", "--", *job]
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def num_raylets(self) -> int:
        """Return the number of raylets on this machine that this head or a job of it has started."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return sum(child.name() == "raylet" for child in children)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    output = tmp_path_factory.mktemp("head") / "output.txt"
    for _ in range(3):  # Ray gives its own processes 30 s to start, which a loaded machine may need alone
        with started_head(output) as head_or_none:
            if head_or_none is not None:
                yield head_or_none
                return
    pytest.fail(output.read_text())


@contextlib.contextmanager
def started_head(output: Path) -> Iterator[Head | None]:
    temp = tempfile.mkdtemp(prefix="ray-")  # the name of a socket in it has room for a hundred letters
    port, client_port, dashboard_port, agent_port = (free_port() for _ in range(4))
    command = [
        *(*RAY, "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=6", f"--port={port}"),
        *(f"--dashboard-port={dashboard_port}", f"--dashboard-agent-listen-port={agent_port}"),
        *(f"--ray-client-server-port={client_port}", f"--temp-dir={temp}", "--object-store-memory=200000000"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    with output.open("ab") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    children: set[psutil.Process] = set()

    def is_up() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            children.update(psutil.Process(process.pid).children(recursive=True))
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", dashboard_port), timeout=1):
            return b"--block" in output.read_bytes()
        return False

    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while not is_up() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        yield Head(f"http://127.0.0.1:{dashboard_port}", process) if process.poll() is None and is_up() else None
    finally:
        is_up()  # for what was started since
        process.terminate()
        process.wait(60)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        survivors(children)
        shutil.rmtree(temp, ignore_errors=True)


def output_of(job: subprocess.Popen[str]) -> str:
    return job.communicate(timeout=START_DEADLINE_S + END_DEADLINE_S)[0]


def test_a_job_trains_on_its_cluster_with_the_submitters_modules_and_goes_on_after_a_warning(
    head: Head, tmp_path: Path, tiny_model: Path
) -> None:
    mine, run_dir = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    (mine / "my_reward.py").write_text(REWARD)
    (mine / "helpers_of_mine.py").write_text(HELPERS)
    overrides = [
        *small(tiny_model),
        *("rollout.reward=my_reward:score", "rollout.max_failed_rewards=0", "trainer.eval_every=0"),
        *("checkpoint.every=100000", "resume=auto"),
    ]
    refused = output_of(head.submit(mine, *overrides, "hydra.run.dir=runs/mine"))
    assert "is in Ray's copy of the job's working directory, which is removed with the job" in refused, refused

    overrides += [f"hydra.run.dir={run_dir}"]
    job = head.submit(mine, *overrides, "trainer.total_steps=100000")
    deadline = time.monotonic() + START_DEADLINE_S
    while not (run_dir / "metrics.jsonl").exists() or len(steps_of(run_dir)) < 2:
        assert job.poll() is None and time.monotonic() < deadline, job.stdout and job.stdout.read()
        time.sleep(0.3)
    assert head.num_raylets() == 1, "the run started no Ray of its own"
    holder = read_holder(run_dir)
    assert holder is not None
    os.kill(holder.pid, signal.SIGUSR1)
    output = output_of(job)
    assert "SIGUSR1: saves a checkpoint after this step, and ends" in output and "failed" in output, output
    num_steps = len(steps_of(run_dir))
    assert "to go on from step" in output and [path.name for path in (run_dir / "checkpoints").iterdir()] == [
        f"step_{num_steps:06d}"
    ]

    output = output_of(head.submit(mine, *overrides, f"trainer.total_steps={num_steps + 1}"))
    assert "succeeded" in output and f"at step {num_steps}" in output, output
    assert [step["step"] for step in steps_of(run_dir)] == list(range(1, num_steps + 2))
    assert audit(run_dir).findings == ()
