"""Faults on simulated engines: parts of a job that break on a virtual clock, and whole jobs killed in real time."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.checkpoint import CHECKPOINTS
from configs.runtime.environment import REPO_ROOT
from configs.schema import Config
from rollout.fleet.lifecycle import ReplicaState
from scripts.bench.faults.job import FaultyReplica, Job, job_config
from scripts.bench.faults.report import Row
from scripts.bench.stand_ins import Nothing
from scripts.bench.virtual_clock import run_virtual
from trainer.tracking.audit import ascends, audit

REPLICA_FAULTS = ("dies", "hangs", "silent", "slow")
LOOP_FAULTS = ("raises", "tool hangs")
STEPS = 30
FAULTS_PER_JOB = 5
LONGEST_RUN_S = 20_000.0
"""Virtual seconds. A job that is not over by then waits for something that never happens."""


class Trained(Nothing):
    """A recorder that keeps which prompts were trained, how many tokens, and how many trajectories descended."""

    def __init__(self) -> None:
        self.ordinals: list[int] = []
        self.tokens = 0
        self.descending_versions = 0

    def record_step(self, global_steps: int, metrics: Any, groups: Any, advantages: Any, tokens: Any = None) -> None:
        self.ordinals += [group.prompt.ordinal for group in groups]
        self.tokens += sum(group.num_tokens for group in groups)
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            for sequence in trajectory.sequences:
                self.descending_versions += not ascends([span.global_steps for span in sequence.spans])


def part_faults(fault: str, num_injections: int, seed: int, update_interval: int = 1) -> Row:
    """Inject one of REPLICA_FAULTS or LOOP_FAULTS into as many jobs on a virtual clock as it takes."""
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
    row.restarted += job.rollouter.counters["restarted"]
    row.descending_versions += trained.descending_versions
    row.tokens_again += sum(replica.simulated.usage.tokens for replica in job.replicas) - trained.tokens


async def _inject(fault: str, job: Job, row: Row, chance: random.Random) -> None:
    """Inject faults at random moments, each after the job has recovered from the one before."""
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
    """Kill whole jobs by SIGKILL at seeded random moments, one in five inside a save, until `num_kills` are done."""
    row = Row(fault="whole job killed", engine="simulated", tokens_again=float("nan"))
    chance = random.Random(seed)
    number = 0
    while row.injected < num_kills:
        run_dir = folder / f"job-{number}"
        number += 1
        last_kill: float | None = None
        for kill in _kills(num_kills - row.injected, chance):
            job = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.job", str(run_dir), str(steps)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPO_ROOT,
            )
            assert job.stdout is not None
            if _took_a_step(job) and last_kill is not None:
                row.recovery_s.append(time.monotonic() - last_kill)
            killed = kill is not None and _carry_out(kill, job, run_dir)
            job.stdout.read()
            if job.wait(120) == 0:
                break
            if not killed:
                raise RuntimeError(f"the job of {run_dir} ended with {job.returncode}, and was not killed")
            row.injected, last_kill = row.injected + 1, time.monotonic()
        found = audit(run_dir)
        if found.findings:
            raise RuntimeError(f"{run_dir}: {found.sentence}")
        row.lost += found.lost + found.missing_steps + (steps - found.steps)
        row.twice += found.twice
        row.descending_versions += found.descending_versions
    return row


@dataclass(frozen=True, slots=True)
class _Kill:
    after_s: float
    """From the first step."""
    in_save: bool = False
    """Inside the next save, `after_s` at the latest."""


def _kills(num_left: int, chance: random.Random) -> Iterator[_Kill | None]:
    """Yield the kills of one job; None lets it end."""
    for index in range(min(num_left, 5)):
        yield _Kill(30.0, in_save=True) if index == 2 else _Kill(chance.uniform(0.0, 1.5))
    yield None


def _took_a_step(job: "subprocess.Popen[str]") -> bool:
    """Wait for the first step, or for the end of the job."""
    assert job.stdout is not None
    return any(line.startswith("step") for line in iter(job.stdout.readline, ""))


def _carry_out(kill: _Kill, job: "subprocess.Popen[str]", run_dir: Path) -> bool:
    """Returns False when the job had ended before."""
    deadline = time.monotonic() + kill.after_s
    while time.monotonic() < deadline and job.poll() is None:
        if kill.in_save and any((run_dir / CHECKPOINTS).glob(".step_*")):
            break
        time.sleep(0.0005 if kill.in_save else 0.01)
    if job.poll() is not None:
        return False
    job.send_signal(signal.SIGKILL)
    return True
