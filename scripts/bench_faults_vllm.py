"""Faults in whole runs of scripts/train.py, on real engines: for scripts/bench_faults.py.

Each fault has a run of its own: an engine, an actor (killed, stopped), an agent worker, a train worker. One more run is
killed as a whole, again and again.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from scripts.audit import audit
from scripts.bench_faults import Row
from trainer.tracking import METRICS_FILE, read_metrics

STEPS = 200
OVERRIDES = (
    "plain_console=true",
    f"trainer.total_steps={STEPS}",
    "trainer.eval_every=0",
    "trainer.prompts_per_step=8",
    "model.warmup_steps=50",
    "data.num_val=8",
    "checkpoint.every=5",
    "rollout.num_replicas=2",
    "rollout.replica_timeout_s=10",
    "wandb.mode=disabled",
)
DEADLINE_S = 300.0
PROCESSES = {
    "engine killed": ("VLLM::EngineCore", signal.SIGKILL),
    "actor killed": ("ray::ReplicaActor", signal.SIGKILL),
    "actor stopped": ("ray::ReplicaActor", signal.SIGSTOP),
    "agent worker killed": ("ray::AgentWorkerActor", signal.SIGKILL),
    "train worker killed": ("ray::TrainWorkerActor", signal.SIGKILL),
}
"""Fault -> the beginning of the process's title, and the signal."""

BACK = {"train worker killed": "the train workers are back", "agent worker killed": None}
"""What the console says when it has been made good, where that is not that a replica is in service. None: nothing."""


class Run:
    """A run of scripts/train.py in a process of its own."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "scripts.train", f"hydra.run.dir={run_dir}", "resume=auto", *OVERRIDES]
        with (run_dir / "console.txt").open("a") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd=Path(__file__).parents[1])

    def wait_for(self, what: str, holds: Callable[[], bool]) -> bool:
        """False when the run has ended before. Raises TimeoutError past DEADLINE_S."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.process.kill()
                raise TimeoutError(f"{what} did not come within {DEADLINE_S:g} s; see {self.run_dir}")
            time.sleep(0.1)
        return True

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        path = self.run_dir / METRICS_FILE
        return max((record["step"] for record in read_metrics(path)), default=0) if path.exists() else 0

    def said(self, what: str) -> int:
        return (self.run_dir / "console.txt").read_text().count(what)

    def processes(self, title: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if " ".join(child.cmdline()).startswith(title):
                    found.append(child)
            except psutil.Error:
                continue  # it ended meanwhile
        return found


def vllm_rows(num_kills: int, seed: int, folder: Path) -> list[Row]:
    rows = [_part_fault(fault, folder / fault.replace(" ", "-")) for fault in PROCESSES]
    return [*rows, _run_kills(num_kills, seed, folder / "run")]


def _part_fault(fault: str, run_dir: Path) -> Row:
    row = Row(fault=fault, engine="vLLM", tokens_again=float("nan"))
    run = Run(run_dir)
    title, number = PROCESSES[fault]
    run.wait_for("step 5", lambda: run.steps >= 5)
    run.processes(title)[0].send_signal(number)
    row.injected, killed_at = 1, time.monotonic()
    back = {"train worker killed": "the train workers are back", "agent worker killed": None}.get(
        fault, " is in service, "
    )
    before = run.steps
    if back is None:
        came = run.wait_for("the next steps", lambda: run.steps >= before + 4)
    else:
        came = run.wait_for(back, lambda: run.said(back) > 0)
    if came:
        row.recovery_s.append(time.monotonic() - killed_at)
    _finish(run, row)
    return row


def _run_kills(num_kills: int, seed: int, run_dir: Path) -> Row:
    row = Row(fault="whole run killed", engine="vLLM", tokens_again=float("nan"))
    chance = random.Random(seed)
    killed_at: float | None = None
    for _ in range(num_kills):
        run = Run(run_dir)
        before = run.steps
        if not run.wait_for("a step", lambda: run.steps > before):  # noqa: B023
            break
        if killed_at is not None:
            row.recovery_s.append(time.monotonic() - killed_at)
        time.sleep(chance.uniform(0.0, 6.0))
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(60)
        row.injected, killed_at = row.injected + 1, time.monotonic()
    _finish(Run(run_dir), row)
    return row


def _finish(run: Run, row: Row) -> None:
    try:
        run.wait_for("the end", lambda: False)
    except TimeoutError:
        row.unbounded_waits += 1
        return
    if run.process.returncode != 0:
        raise RuntimeError(f"the run ended with {run.process.returncode}; see {run.run_dir / 'console.txt'}")
    found = audit(run.run_dir)
    row.lost += found.lost + STEPS - found.steps
    row.twice += found.twice
    row.descending_versions += found.descending_versions
    row.restarted += _restarted(run)


def _restarted(run: Run) -> int:
    return int(json.loads((run.run_dir / "summary.json").read_text())["restarted"])
