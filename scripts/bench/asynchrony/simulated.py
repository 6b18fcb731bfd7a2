"""Asynchronous against synchronous on simulated engines: the real scheduling on a virtual clock, with no noise.

Buffer, slot ledger, router, rollouter, agent worker, replica, train loop and checkpoint manager are the real ones.
Engines take `token_s` per token and trainers `train_s` per step of a virtual clock, so that a run takes seconds and its
figures repeat exactly.
"""

import asyncio
from typing import Any

from configs.schema import AlgorithmConfig, Config, RolloutConfig, TrainerConfig, WeightSyncConfig
from rollout.events.driver import NO_EVENTS, DriverEvents, Write
from rollout.events.log import EventLog
from rollout.replica.replica import RolloutReplica
from scripts.bench.asynchrony.limits import Job, group_lengths, limit_ratio
from scripts.bench.asynchrony.outcome import DEFAULT_STALENESS, HEADER, Outcome
from scripts.bench.common import ForcedLengths, LogNormalLengths, show_table
from scripts.bench.simulated_engine import SimulatedEngine
from scripts.bench.simulated_run import NEVER_S, SimulatedRun
from scripts.bench.stand_ins import Nothing, SimulatedTrainer
from scripts.bench.virtual_clock import run_virtual


def bench_simulated(num_steps: int) -> dict[str, float]:
    """Show a table of all runs. Returns the figures of the last line."""
    rows, results = [], {}
    for name, sigma in (("equal", 0.0), ("longtail", 1.0)):
        job = Job(length_of=LogNormalLengths(mean=200, sigma=sigma, cap=2000), num_steps=num_steps)
        synchronous = run_job(job, 0)
        for max_staleness in (0, 1, DEFAULT_STALENESS, 4, 8):
            outcome = run_job(job, max_staleness)
            ratio, limit = synchronous.seconds / outcome.seconds, limit_ratio(job, max_staleness)
            row = outcome.row(f"{name}, {max_staleness}", ratio)
            rows.append([*row, f"{outcome.seats_used:.0%}", f"{limit:.2f}", f"{ratio / limit:.0%}"])
            if max_staleness == DEFAULT_STALENESS:
                results[f"async_over_sync_{name}"] = ratio
                results |= {f"{name}_limit": limit, f"{name}_share_of_limit": ratio / limit}
                results |= {"trainer_idle": outcome.trainer_idle, "replica_idle": outcome.replica_idle}
        rows.append([f"{name}, no bound", "", "", "", "", "", f"{limit_ratio(job, None):.2f}", ""])
    title = (
        f"simulated: {num_steps} steps of 16 prompts x 8 responses of 200 tokens on average, 10 ms a token; 2 replicas "
        "of 64 seats; 2 s of training a step"
    )
    show_table(title, [*HEADER, "seats used", "limit", "of limit"], rows)
    return results


def run_job(job: Job, max_staleness: int) -> Outcome:
    """Run the whole job on a virtual clock. The same arguments give the same outcome."""
    return run_virtual(run_job_here(job, max_staleness))


async def run_job_here(job: Job, max_staleness: int, *, write: Write | None = None, recorder: Any = None) -> Outcome:
    """Run the job on the clock of the running event loop. `write`: takes its events. `recorder`: takes its steps."""
    clock = asyncio.get_running_loop().time
    events = NO_EVENTS if write is None else DriverEvents(write, clock)
    logs = {f"replica-{index}": EventLog(clock, is_on=events.is_on) for index in range(job.num_replicas)}
    replicas = [SimulatedReplica(name, job, log) for name, log in logs.items()]
    run = SimulatedRun(
        config=_config(job, max_staleness),
        replicas=replicas,
        workers=SimulatedTrainer(job.train_s),
        loop=ForcedLengths({"": job.length_of}),
        recorder=recorder or Nothing(),
        events=events,
        of_agents=EventLog(clock, is_on=events.is_on),
    )
    seconds = await run.train()
    busy_s = sum(replica.busy_s for replica in replicas)
    tokens = sum(map(sum, group_lengths(job)))
    return Outcome(
        seconds=seconds,
        samples_per_s=job.num_trajectories / seconds,
        trainer_idle=1 - job.num_steps * job.train_s / seconds,
        replica_idle=1 - busy_s / (seconds * job.num_replicas),
        seats_used=tokens * job.token_s / (seconds * job.num_replicas * job.max_num_seqs),
    )


def _config(job: Job, max_staleness: int) -> Config:
    return Config(
        algorithm=AlgorithmConfig(group_size=job.group_size),
        rollout=RolloutConfig(
            num_replicas=job.num_replicas,
            max_num_seqs=job.max_num_seqs,
            max_staleness=max_staleness,
            group_timeout_s=NEVER_S,
        ),
        trainer=TrainerConfig(
            total_steps=job.num_steps, prompts_per_step=job.prompts_per_step, eval_every=0, batch_timeout_s=NEVER_S
        ),
        weight_sync=WeightSyncConfig(),
    )


class SimulatedReplica(RolloutReplica):
    """A replica that measures how long its engine was stepping."""

    def __init__(self, name: str, job: Job, events: EventLog):
        self._token_s = job.token_s
        self.busy_s = 0.0
        engine = SimulatedEngine(
            length_of=lambda request: request.sampling.max_tokens,
            step_s=job.token_s,
            max_num_seqs=job.max_num_seqs,
            swap_s=job.swap_s,
            sleep=self._sleep,
        )
        super().__init__(name, engine, WeightSyncConfig(), events=events)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if seconds == self._token_s:
            self.busy_s += seconds
