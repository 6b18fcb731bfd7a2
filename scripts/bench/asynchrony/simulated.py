"""Asynchronous against synchronous on simulated engines: the real scheduling, a virtual clock, no model, no noise.

Everything that decides who waits for whom is the real thing: buffer, slot ledger, router, rollouter, agent worker,
replica, train loop, checkpoint manager. Engines take `token_s` per token and trainers `train_s` per step of a virtual
clock, so a run takes seconds and its numbers repeat exactly.

What the ratio can be at most is arithmetic over the lengths of the run. B groups are trained per step, S is
max_staleness, A(k) is when version k is live (A(0) = 0), and longest(k) is how long the longest response of groups
kB .. (k+1)B - 1 takes.

- Synchronous (S = 0): A(k+1) = A(k) + longest(k) + train_s.
- Within the window: a step frees B slots, so the groups that step k trains are claimed at A(k-S) at the earliest, and
  none of them may be trained later: A(k+1) >= max(A(k), A(k-S) + longest(k)) + train_s. S + 1 batches overlap, so the
  ratio is about S + 1 at most while the longest response dominates.
- The engines need sum(lengths) * token_s / seats, and the last step comes after that.
- The trainer needs train_s per step; this one is part of the recurrence.

The limit is the synchronous time over the larger of the last bounds. For S without bound only throughput is left.
"""

import asyncio
from dataclasses import dataclass
from functools import cache
from typing import Any

from configs.schema import AlgorithmConfig, Config, RolloutConfig, TrainerConfig, WeightSyncConfig
from rollout.agents.worker import AgentWorker
from rollout.buffer import make_buffer
from rollout.engines.simulated import SimulatedEngine
from rollout.fleet.episodes import FleetEpisodes
from rollout.fleet.fleet import ReplicaFleet
from rollout.prompts import EncodedRow, PromptStream, Row
from rollout.replica.replica import RolloutReplica
from rollout.rollouter import Rollouter
from rollout.router import ReplicaRouter, max_inflight
from rollout.types import FloatArray, Prompt, SamplingParams
from scripts.bench.common import ForcedLengths, LengthOf
from scripts.bench.virtual_clock import run_virtual
from scripts.launch.supervision import until_first_ends
from trainer.batch import StepBatch
from trainer.loop import TrainLoop
from trainer.metrics import Last, Max, Metric
from weight_sync.checkpoint_manager import CheckpointManager


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job. The defaults keep every seat busy for two seconds per step, and the trainer as long."""

    length_of: LengthOf
    num_steps: int = 40
    prompts_per_step: int = 16
    group_size: int = 8
    num_replicas: int = 2
    max_num_seqs: int = 64
    token_s: float = 0.01
    """Of one token of every running response, however many run."""
    train_s: float = 2.0
    swap_s: float = 0.02
    """A replica stands still for this long at every update, and until its token is done."""

    @property
    def num_trajectories(self) -> int:
        return self.num_steps * self.prompts_per_step * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run came to."""

    seconds: float
    samples_per_s: float
    """Trajectories trained per second."""
    trainer_idle: float
    """Share of the run in which the trainer does not train."""
    replica_idle: float
    """Share of the run in which a replica has no request at all, averaged over replicas."""
    seats_used: float = float("nan")
    """Tokens sampled over those that the engines could have sampled with every seat taken."""


def run_job(job: Job, max_staleness: int) -> Outcome:
    """The whole job on a virtual clock. The same arguments give the same outcome."""
    return run_virtual(_run(job, max_staleness))


async def _run(job: Job, max_staleness: int) -> Outcome:
    clock = asyncio.get_running_loop().time
    config = Config(
        algorithm=AlgorithmConfig(group_size=job.group_size),
        rollout=RolloutConfig(num_replicas=job.num_replicas, max_staleness=max_staleness),
        trainer=TrainerConfig(
            total_steps=job.num_steps, prompts_per_step=job.prompts_per_step, eval_every=0, batch_timeout_s=1e6
        ),
        weight_sync=WeightSyncConfig(),
    )
    replicas = [SimulatedReplica(f"replica-{index}", job) for index in range(job.num_replicas)]
    workers: Any = SimulatedTrainer(job.train_s)  # stands for the trainer's own workers
    buffer = make_buffer(config)
    router = ReplicaRouter([replica.name for replica in replicas], max_inflight(job.max_num_seqs, job.group_size))
    fleet = ReplicaFleet(replicas, router, min_replicas=1, report=[].append)
    row = EncodedRow(row=Row(question="", ground_truth=""), text="", token_ids=(1, 2))
    manager = CheckpointManager(workers, fleet, config.weight_sync)
    agents = AgentWorker(
        config=config,
        tokenizer=NoTokenizer(),
        loop=ForcedLengths({"": job.length_of}),
        reward=no_reward,
        replicas={replica.name: replica.generate_group for replica in replicas},
    )
    rollouter = Rollouter(
        stream=PromptStream([row], seed=0),
        buffer=buffer,
        router=router,
        episodes=FleetEpisodes(agents, fleet, manager.publishing),
        sampling=SamplingParams(),
        group_size=job.group_size,
        group_timeout_s=1e6,
    )
    nothing: Any = Nothing()
    no_checkpoints: Any = NoCheckpoints()
    loop = TrainLoop(
        config=config,
        buffer=buffer,
        workers=workers,
        manager=manager,
        held_out=nothing,
        fleet=nothing,
        recorder=nothing,
        checkpointer=no_checkpoints,
    )
    await manager.update_weights(0)
    started, busy_before = clock(), [replica.busy_s for replica in replicas]
    await until_first_ends(loop.run(), beside=[rollouter.run()])
    seconds = clock() - started
    busy_s = sum(replica.busy_s for replica in replicas) - sum(busy_before)
    tokens = sum(map(sum, _group_lengths(job)))
    return Outcome(
        seconds=seconds,
        samples_per_s=job.num_trajectories / seconds,
        trainer_idle=1 - job.num_steps * job.train_s / seconds,
        replica_idle=1 - busy_s / (seconds * job.num_replicas),
        seats_used=tokens * job.token_s / (seconds * job.num_replicas * job.max_num_seqs),
    )


# -- limits ------------------------------------------------------------------------------------------------------------


@cache
def _group_lengths(job: Job) -> list[list[int]]:
    """Response lengths in tokens: [num_steps * prompts_per_step][group_size]."""
    return [
        [job.length_of(ordinal, index) for index in range(job.group_size)]
        for ordinal in range(job.num_steps * job.prompts_per_step)
    ]


def window_seconds(job: Job, max_staleness: int) -> float:
    """How long the job takes at least within the window, with a seat for every response."""
    batch_size = job.prompts_per_step
    group_s = [max(lengths) * job.token_s for lengths in _group_lengths(job)]
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
    """How long the job takes at least without a window: every seat always taken, or the trainer always training."""
    lengths = _group_lengths(job)
    generating = sum(map(sum, lengths)) * job.token_s / (job.num_replicas * job.max_num_seqs)
    first = min(max(group) for group in lengths) * job.token_s
    return max(generating + job.train_s, first + job.num_steps * job.train_s)


def limit_ratio(job: Job, max_staleness: int | None) -> float:
    """Asynchronous over synchronous samples per second, at most. None: without a bound on staleness."""
    bound = throughput_seconds(job)
    if max_staleness is not None:
        bound = max(bound, window_seconds(job, max_staleness))
    return window_seconds(job, 0) / bound


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class SimulatedReplica(RolloutReplica):
    """A replica that says for how long its engine stepped."""

    def __init__(self, name: str, job: Job):
        self._token_s = job.token_s
        self.busy_s = 0.0
        engine = SimulatedEngine(
            length_of=lambda request: request.sampling.max_tokens,
            step_s=job.token_s,
            max_num_seqs=job.max_num_seqs,
            swap_s=job.swap_s,
            sleep=self._sleep,
        )
        super().__init__(name, engine, WeightSyncConfig())

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if seconds == self._token_s:
            self.busy_s += seconds


class SimulatedTrainer:
    """Trains for a fixed time, and publishes nothing but a version."""

    def __init__(self, train_s: float):
        self._train_s = train_s
        self.global_steps = 0

    async def score(self, batch: StepBatch) -> dict[str, FloatArray]:
        raise RuntimeError("the job has no reference policy")

    async def train_step(self, batch: StepBatch, global_steps: int) -> dict[str, Metric]:
        await asyncio.sleep(self._train_s)
        self.global_steps = global_steps + 1
        return {"perf/trainer_busy_s": Max(self._train_s), "actor/skipped_steps": Last(0.0)}

    async def skip_step(self, global_steps: int) -> dict[str, Metric]:
        raise RuntimeError("simulated logprobs are finite")

    def gauges(self) -> dict[str, float]:
        return {}

    async def publish(self, global_steps: int, receivers: dict[str, int], base: int | None) -> dict[str, Any]:
        return {"global_steps": global_steps, "nbytes": 0, "checksum": 0}

    async def send(self, manifest: dict[str, Any]) -> int:
        return 0


async def no_reward(prompt: Prompt, text: str) -> float:
    """Async, as a thread would not wait for the virtual clock."""
    return 0.0


class NoTokenizer:
    eos_token_id = 0

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return ""


class Nothing:
    """What the job does without: evaluation, metrics of the fleet, records."""

    async def evaluate(self) -> Any:
        raise RuntimeError("the job has no held-out set")

    async def gauges(self) -> dict[str, float]:
        return {}

    def record_step(self, global_steps: int, metrics: Any, groups: Any, advantages: Any) -> None: ...

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None: ...

    def state(self) -> bytes:
        return b""

    def record_skipped_step(self, global_steps: int, reason: str, groups: Any, advantages: Any) -> tuple[int, str]:
        raise RuntimeError(f"step {global_steps}: {reason}")


class NoCheckpoints:
    def is_due(self, global_steps: int) -> bool:
        return False

    async def stage(self, global_steps: int) -> None: ...

    def commit(self, files: dict[str, bytes]) -> None: ...

    def gauges(self) -> dict[str, float]:
        return {}
