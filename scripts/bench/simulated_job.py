"""A job on simulated engines and a virtual clock, and how much faster asynchrony can make it at most.

Buffer, slot ledger, router, rollouter, agent worker, replicas, train loop and checkpoint manager are the real ones,
wired by `SimulatedRun`. Engines take `token_s` per token and the trainer `train_s` per step, so that a run takes
seconds and its figures repeat exactly.

The limit is arithmetic over the lengths of the responses. B groups are trained per step, S is max_staleness, A(k) is
when version k is live (A(0) = 0), and longest(k) is how long the longest response of groups kB .. (k+1)B - 1 takes,
with its tool if it has one.

- Synchronous (S = 0): A(k+1) = A(k) + longest(k) + train_s.
- Window: a step frees B slots, so the groups that step k trains are claimed at A(k-S) at the earliest, and none of them
  may be trained later: A(k+1) >= max(A(k), A(k-S) + longest(k)) + train_s. S + 1 batches overlap, so that the ratio is
  about S + 1 at most while the longest response dominates.
- Engines: sum(lengths) * token_s / seats, and the last step comes after that.
- Trainer: train_s per step; already part of the recurrence.

The limit is the synchronous time over the largest of the other bounds. Without a bound on S only throughput is left.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from configs.schema import Config, StalePolicy
from rollout.engines.simulated import SimulatedEngine
from rollout.engines.virtual_clock import run_virtual
from rollout.events.driver import Write
from scripts.bench.common import ForcedLengths, LengthOf, SlowTools, ToolSecondsOf
from scripts.simulate.setup import Setup
from scripts.simulate.simulated_run import SimulatedRun
from scripts.simulate.stand_ins import Nothing, SimulatedTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job. The defaults keep every seat busy for two seconds per step, and the trainer as long."""

    length_of: LengthOf
    tool_s: ToolSecondsOf | None = None
    """The seconds of an episode's tool, after which the policy answers again as long as before; 0: it has none. None:
    there are no tools, and the episodes of a group end together."""
    num_steps: int = 40
    prompts_per_step: int = 16
    group_size: int = 8
    num_replicas: int = 2
    max_num_seqs: int = 64
    token_s: float = 0.01
    """Seconds per token of every running response, however many run."""
    train_s: float = 2.0
    swap_s: float = 0.02
    """Every update pauses a replica for this long, after its current token."""

    @property
    def num_trajectories(self) -> int:
        return self.num_steps * self.prompts_per_step * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The time that a job took, and the shares of it in which something stood idle."""

    seconds: float
    samples_per_s: float
    """Trajectories trained per second."""
    trainer_idle: float
    """The share of the run in which the trainer does not train."""
    replica_idle: float
    """The share of the run in which a replica has no request at all, averaged over replicas."""


def run_job(job: Job, max_staleness: int, *, policy: StalePolicy = StalePolicy.wait, recorder: Any = None) -> Outcome:
    """Run the whole job on a virtual clock. The same arguments give the same outcome."""
    return run_virtual(run_job_here(job, max_staleness, policy=policy, recorder=recorder))


async def run_job_here(
    job: Job,
    max_staleness: int,
    *,
    policy: StalePolicy = StalePolicy.wait,
    write: Write | None = None,
    recorder: Any = None,
) -> Outcome:
    """Run the job on the clock of the running event loop. `write` takes its events, `recorder` its steps."""
    engines = [
        SimulatedEngine(step_s=job.token_s, max_num_seqs=job.max_num_seqs, swap_s=job.swap_s)
        for _ in range(job.num_replicas)
    ]
    run = SimulatedRun(
        config=_config(job, max_staleness, policy),
        engines=engines,
        workers=SimulatedTrainer(job.train_s),
        loop=ForcedLengths({"": job.length_of}) if job.tool_s is None else SlowTools(job.length_of, job.tool_s),
        recorder=recorder or Nothing(),
        write=write,
    )
    seconds = await run.train()
    busy_s = sum(engine.usage.busy_s for engine in engines)
    return Outcome(
        seconds=seconds,
        samples_per_s=job.num_trajectories / seconds,
        trainer_idle=1 - job.num_steps * job.train_s / seconds,
        replica_idle=1 - busy_s / (seconds * job.num_replicas),
    )


def _config(job: Job, max_staleness: int, policy: StalePolicy) -> Config:
    setup = Setup(
        num_replicas=job.num_replicas,
        max_num_seqs=job.max_num_seqs,
        max_staleness=max_staleness,
        stale_policy=policy.value,
        group_size=job.group_size,
        prompts_per_step=job.prompts_per_step,
        steps=job.num_steps,
    )
    return setup.config()


# -- the limit ---------------------------------------------------------------------------------------------------------


@cache
def group_lengths(job: Job) -> list[list[int]]:
    """Return response lengths in tokens, of both turns where there is a tool: [num_steps * prompts_per_step]
    [group_size]."""
    return [
        [
            job.length_of(ordinal, index) * (1 if _tool_s(job, ordinal, index) == 0 else 2)
            for index in range(job.group_size)
        ]
        for ordinal in range(job.num_steps * job.prompts_per_step)
    ]


def group_seconds(job: Job) -> list[float]:
    """Return how long each group takes where every episode has a seat."""
    return [
        max(length * job.token_s + _tool_s(job, ordinal, index) for index, length in enumerate(lengths))
        for ordinal, lengths in enumerate(group_lengths(job))
    ]


def _tool_s(job: Job, ordinal: int, index: int) -> float:
    return 0.0 if job.tool_s is None else job.tool_s(ordinal, index)


def window_seconds(job: Job, max_staleness: int) -> float:
    """Return the lower bound of the job's time that the window sets, with a seat for every response."""
    batch_size = job.prompts_per_step
    group_s = group_seconds(job)
    ready: list[float] = []
    live = [0.0]
    for step in range(job.num_steps):
        claimed = group_s[len(ready) : batch_size * (step + max_staleness + 1)]
        ready += [live[step] + seconds for seconds in claimed]
        trained = batch_size * (step + 1)
        if step < max_staleness:
            start = sorted(ready)[trained - 1]  # the first groups of all may be trained in any order
        else:
            start = max(ready[:trained])
        live.append(max(live[step], start) + job.train_s)
    return live[-1]


def throughput_seconds(job: Job) -> float:
    """Return the lower bound of the job's time without a window: every seat is always taken, or the trainer always
    trains."""
    lengths = group_lengths(job)
    generating = sum(map(sum, lengths)) * job.token_s / (job.num_replicas * job.max_num_seqs)
    first = min(group_seconds(job))
    return max(generating + job.train_s, first + job.num_steps * job.train_s)


def limit_ratio(job: Job, max_staleness: int | None) -> float:
    """Return the upper bound of asynchronous over synchronous samples per second. None: staleness has no bound."""
    bound = throughput_seconds(job)
    if max_staleness is not None:
        bound = max(bound, window_seconds(job, max_staleness))
    return window_seconds(job, 0) / bound
