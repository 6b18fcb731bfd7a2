"""What faults cost: injected one after the other into running jobs, and audited by what was trained.

    python -m scripts.bench.faults [--injections 100] [--kills 20] [--interval 1] [--seed 0] [--vllm] [--vllm-kills 3]

On simulated engines (scripts/fault_job.py): replicas that die, hang, fall silent or slow down, and agent loops that
raise or hang, on a virtual clock; and the whole job killed by SIGKILL in real time, to go on from its newest
checkpoint. With --vllm processes of whole runs of scripts/train.py are killed, stopped or slowed down besides, and one
whole run is killed, also inside saves and updates: see scripts/bench_faults_vllm.py.

The last line is JSON: the sums of injected, lost, twice, restarted, descending_versions, unbounded_waits.
"""

import argparse
import asyncio
import json
import logging
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from configs.checkpoint import CHECKPOINTS
from configs.runtime.environment import REPO_ROOT
from configs.schema import Config
from rollout.fleet.lifecycle import ReplicaState
from scripts.audit import ascends, audit
from scripts.bench.asynchrony.simulated import Nothing
from scripts.bench.common import show_table, write_line
from scripts.bench.faults.job import FaultyReplica, Job, job_config
from scripts.bench.virtual_clock import run_virtual

REPLICA_FAULTS = ("dies", "hangs", "silent", "slow")
LOOP_FAULTS = ("raises", "tool hangs")
STEPS = 30
FAULTS_PER_JOB = 5
LONGEST_RUN_S = 20_000.0
"""Of the virtual clock. A job that is not over by then waits for what never comes."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the table."""

    fault: str
    engine: str
    injected: int = 0
    lost: int = 0
    twice: int = 0
    restarted: int = 0
    """Trajectories that started again from nothing."""
    descending_versions: int = 0
    """Trajectories with a token of an older version than the one before it."""
    recovery_s: list[float] = field(default_factory=list)
    tokens_again: float = 0
    """Sampled again, because they were lost. NaN where it is not known."""
    unbounded_waits: int = 0


class Trained(Nothing):
    """A recorder that keeps which prompts were trained, how many tokens, and whether their versions ascended."""

    def __init__(self) -> None:
        self.ordinals: list[int] = []
        self.tokens = 0
        self.descending_versions = 0

    def record_step(self, global_steps: int, metrics: Any, groups: Any, advantages: Any) -> None:
        self.ordinals += [group.prompt.ordinal for group in groups]
        self.tokens += sum(group.num_tokens for group in groups)
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            self.descending_versions += not ascends([span.global_steps for span in trajectory.spans])


def part_faults(fault: str, num_injections: int, seed: int, update_interval: int = 1) -> Row:
    config = job_config(STEPS, update_interval=update_interval)
    row = Row(fault=f"replica {fault}" if fault in REPLICA_FAULTS else f"agent loop {fault}", engine="simulated")
    for number in range(0, num_injections, FAULTS_PER_JOB):
        run_virtual(_one_job(fault, config, row, random.Random(f"{fault}/{seed}/{number}")))
    return row


async def _one_job(fault: str, config: Config, row: Row, chance: random.Random) -> None:
    trained = Trained()
    job = Job(config, token_s=0.05, train_s=2.0, recorder=trained, resumed=None)
    injecting = asyncio.create_task(_inject(fault, job, row, chance))
    try:
        async with asyncio.timeout(LONGEST_RUN_S):
            await job.run()
    except TimeoutError:
        row.unbounded_waits += 1
    injecting.cancel()
    expected = STEPS * config.trainer.prompts_per_step
    row.lost += len(set(range(expected)) - set(trained.ordinals))
    row.twice += len(trained.ordinals) - len(set(trained.ordinals))
    row.restarted += job.rollouts.rollouter.counters["restarted"]
    row.descending_versions += trained.descending_versions
    row.tokens_again += sum(replica.simulated.usage.tokens for replica in job.replicas) - trained.tokens


async def _inject(fault: str, job: Job, row: Row, chance: random.Random) -> None:
    """At random moments, each after the job has recovered from the one before."""
    for _ in range(FAULTS_PER_JOB):
        await asyncio.sleep(chance.uniform(0.5, 8.0))
        if fault in LOOP_FAULTS:
            job.loop.faults.append("raises" if fault == "raises" else "hangs")
            row.injected += 1
            continue
        victim = chance.choice(_in_service(job))
        victim.break_by(fault)
        row.injected += 1
        broken_at = asyncio.get_running_loop().time()
        while victim in _in_service(job) or len(_in_service(job)) < job_config(STEPS).rollout.num_replicas:
            await asyncio.sleep(0.1)
        row.recovery_s.append(asyncio.get_running_loop().time() - broken_at)


def _in_service(job: Job) -> list[FaultyReplica]:
    lives = job.fleet.lives
    return [r for r in job.replicas if r.name in lives and lives[r.name].state is ReplicaState.READY]


def job_kills(num_kills: int, seed: int, folder: Path, steps: int = 60) -> Row:
    """SIGKILL of the whole job at seeded random moments, one in five inside a save, until `num_kills` are done."""
    row = Row(fault="whole job killed", engine="simulated", tokens_again=float("nan"))
    chance = random.Random(seed)
    number = 0
    while row.injected < num_kills:
        run_dir = folder / f"job-{number}"
        number += 1
        last_kill: float | None = None
        for kill in _kills(num_kills - row.injected, chance):
            job = subprocess.Popen(
                [sys.executable, "-m", "scripts.bench.faults.job", str(run_dir), str(steps)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPO_ROOT,
            )
            assert job.stdout is not None
            if _first_step(job) and last_kill is not None:
                row.recovery_s.append(time.monotonic() - last_kill)
            killed = kill is not None and _kill(job, run_dir, kill)
            job.stdout.read()
            if job.wait(120) == 0:
                break
            if not killed:
                raise RuntimeError(f"the job of {run_dir} ended with {job.returncode}, and nobody killed it")
            row.injected, last_kill = row.injected + 1, time.monotonic()
        found = audit(run_dir)
        row.lost += found.lost + found.missing_steps + (steps - found.steps)
        row.twice += found.twice
        row.descending_versions += found.descending_versions
    return row


def _kills(num_left: int, chance: random.Random) -> Iterator[float | None]:
    """Seconds after the first step; None: let it end. Negative: inside the next save."""
    for index in range(min(num_left, 5)):
        yield -1.0 if index == 2 else chance.uniform(0.0, 1.5)
    yield None


def _first_step(job: "subprocess.Popen[str]") -> bool:
    assert job.stdout is not None
    return any(line.startswith("step") for line in iter(job.stdout.readline, ""))


def _kill(job: "subprocess.Popen[str]", run_dir: Path, seconds: float) -> bool:
    """False when it was over before."""
    deadline = time.monotonic() + (30.0 if seconds < 0 else seconds)
    while time.monotonic() < deadline and job.poll() is None:
        if seconds < 0 and any((run_dir / CHECKPOINTS).glob(".step_*")):
            break
        time.sleep(0.0005 if seconds < 0 else 0.01)
    if job.poll() is not None:
        return False
    job.send_signal(signal.SIGKILL)
    return True


def show(rows: list[Row]) -> None:
    header = (
        "fault",
        "engine",
        "injected",
        "lost",
        "twice",
        "restarted",
        "descending",
        "recovery s",
        "tokens again",
        "unbounded",
    )
    lines = [
        (
            row.fault,
            row.engine,
            f"{row.injected}",
            f"{row.lost}",
            f"{row.twice}",
            f"{row.restarted}",
            f"{row.descending_versions}",
            f"{median(row.recovery_s):.1f}" if row.recovery_s else "-",
            "-" if row.tokens_again != row.tokens_again else f"{row.tokens_again / max(1, row.injected):.0f} each",
            f"{row.unbounded_waits}",
        )
        for row in rows
    ]
    show_table("faults (recovery: median seconds until all replicas serve again, or the next step)", header, lines)
    write_line(json.dumps(sums(rows)))


def sums(rows: list[Row]) -> dict[str, int]:
    return {
        "injected": sum(row.injected for row in rows),
        "lost": sum(row.lost for row in rows),
        "twice": sum(row.twice for row in rows),
        "restarted": sum(row.restarted for row in rows),
        "descending_versions": sum(row.descending_versions for row in rows),
        "unbounded_waits": sum(row.unbounded_waits for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_faults", description="What faults cost.")
    parser.add_argument("--injections", type=int, default=100, help="of each fault of a part, on simulated engines")
    parser.add_argument("--kills", type=int, default=20, help="of the whole job, on simulated engines")
    parser.add_argument("--interval", type=int, default=1, help="weight_sync.interval of the jobs whose parts break")
    parser.add_argument("--vllm", action="store_true", help="whole runs on vLLM too: minutes")
    parser.add_argument(
        "--vllm-kills",
        type=int,
        default=3,
        help="of a whole run, on vLLM, by turns at any moment, inside a save and inside a weight update",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # every failed group is a warning
    faults = (*REPLICA_FAULTS, *LOOP_FAULTS)
    rows = [part_faults(fault, options.injections, options.seed, options.interval) for fault in faults]
    with tempfile.TemporaryDirectory() as folder:
        rows.append(job_kills(options.kills, options.seed, Path(folder)))
        if options.vllm:
            from scripts.bench.faults.real import vllm_rows  # noqa: PLC0415

            rows += vllm_rows(options.vllm_kills, options.seed, Path(folder))
    show(rows)


if __name__ == "__main__":
    main()
