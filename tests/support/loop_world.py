"""Everything around TrainLoop, as one fake that writes down what it is asked."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from configs.data import SftConfig
from configs.schema import AlgorithmConfig, Config, Layout, TrainerConfig, WeightSyncConfig
from rollout.types import FloatArray, TrainBatch, TrajectoryGroup, VersionSpan
from tests.support.reference import make_group, make_trajectory
from tests.support.sequences import with_sequence
from trainer.batch import StepBatch, StepResult
from trainer.loop import TrainLoop
from trainer.metrics import Last, Max, Mean, Metric, Sum
from trainer.old_logprobs import MixedBatch, OldLogprobs
from trainer.ports import ReplicaCheck
from trainer.supervised.demonstrations import DemonstrationStream
from trainer.tokens import TrainedTokens
from trainer.tracking.proof import Evidence
from weight_sync.protocol import ReplicaUpdate, WeightTag


@dataclass(frozen=True)
class Held:
    accuracy: float
    versions: tuple[int, ...]


class Report:
    replicas = (ReplicaUpdate(name="replica-0", tag=WeightTag(1, 77), stage_s=0.0, pause_s=0.012, swap_s=0.0),)
    failures = 0

    def gauges(self) -> dict[str, float]:
        return {"weight_sync/pause_ms": 12.0}


@dataclass
class World:
    """Everything around the loop. The event named in `fails` raises."""

    events: list[str] = field(default_factory=list)
    fails: str = ""
    due: tuple[int, ...] = ()
    """Steps with a checkpoint."""
    finish_reasons: list[str] = field(default_factory=lambda: ["stop"] * 4)
    newest_evaluated: int = -1
    batches: list[StepBatch] = field(default_factory=list)
    scored: list[StepBatch] = field(default_factory=list)
    records: dict[int, dict[str, float]] = field(default_factory=dict)
    recorded_tokens: dict[int, TrainedTokens | None] = field(default_factory=dict)
    evidence: dict[int, Evidence] = field(default_factory=dict)
    recorded_advantages: list[list[list[float]]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    update_ends_after: dict[int, str] = field(default_factory=dict)
    """The event, by version, that its update waits for once it is published."""
    batch_waits_for_record: bool = False
    ready: tuple[TrajectoryGroup, ...] = ()
    """The groups that are there while a batch is waited for."""
    ready_before: dict[int, str] = field(default_factory=dict)
    """The event, by step, for which the groups wait before they are a batch."""
    scored_tokens: list[int] = field(default_factory=list)
    """The number of targets of each call of `old_logprobs`."""
    live: int = 0
    evaluation_ends_after: str = ""
    """The event that an evaluation waits for."""
    broken_steps: tuple[int, ...] = ()
    """In which the workers find NaN or infinity."""
    broken_rollouts: tuple[int, ...] = ()
    """The steps whose batch has a rollout logprob of -inf: of the second prompt's third trajectory."""
    skipped_steps: int = 0
    ends_at: str = ""
    """The event at which a scheduler's warning comes."""
    end_early: Callable[[], None] = lambda: None
    lag: int = 2
    """The steps between the weights that sampled a batch and those that it trains."""

    async def happen(self, event: str) -> None:
        self.events.append(event)
        if event == self.ends_at:
            self.end_early()
        await asyncio.sleep(0)
        if event == self.fails:
            raise RuntimeError(f"{event} broke")

    async def next_batch(self, global_steps: int) -> TrainBatch:
        while self.batch_waits_for_record and global_steps and f"record {global_steps}" not in self.events:
            await asyncio.sleep(0)
        groups = self._groups(global_steps)
        if global_steps in self.ready_before:
            self.ready = groups
            async with asyncio.timeout(10):
                while self.ready_before[global_steps] not in self.events:
                    await asyncio.sleep(0)
        self.ready = ()
        await self.happen(f"next_batch {global_steps}")
        return TrainBatch(groups=groups, masked_tokens=3)

    def _groups(self, global_steps: int) -> tuple[TrajectoryGroup, ...]:
        spans = (VersionSpan(0, 3, max(0, global_steps - self.lag)),)
        trajectories = [
            make_trajectory([5, 6], [7, 8, 9], reward=float(i == 0), finish_reason=reason, spans=spans)
            for i, reason in enumerate(self.finish_reasons)
        ]
        others = list(trajectories)
        if global_steps in self.broken_rollouts:
            others[2] = with_sequence(others[2], rollout_logprobs=np.array([0, -np.inf, 0], np.float32))
        return make_group(2 * global_steps, trajectories), make_group(2 * global_steps + 1, others)

    async def score(self, batch: StepBatch) -> dict[str, FloatArray]:
        """The KL of every trajectory's first token is its place in the step, at later tokens it is 0."""
        self.events.append("score")
        self.scored.append(batch)
        kl = np.zeros(batch.num_tokens, np.float32)
        kl[::3] = np.arange(len(kl) // 3)
        return {"reference_logprobs": -np.arange(batch.num_tokens, dtype=np.float32), "kl": kl}

    async def old_logprobs(self, batch: MixedBatch) -> OldLogprobs:
        """Those of the first row's first target are not known; others are minus their version."""
        assert self.publishing.locked(), "the weights change meanwhile"
        self.events.append("old_logprobs")
        self.scored_tokens.append(sum(len(row.batch.index) for mine in batch.rows for row in mine))
        outputs = [[-row.owners[row.batch.sources].astype(np.float32) for row in mine] for mine in batch.rows]
        outputs[0][0][0] = np.nan
        return batch.gather(outputs)

    async def train_step(self, batch: StepBatch | None, global_steps: int) -> StepResult:
        assert self.publishing.locked(), "the weights may be read meanwhile"
        if batch is None:
            await self.happen(f"skip_step {global_steps}")
            return StepResult({"actor/skipped_steps": Last(1.0), "perf/trainer_busy_s": Max(0.0)})
        await self.happen(f"train_step {global_steps}")
        self.batches.append(batch)
        is_broken = global_steps in self.broken_steps
        metrics: dict[str, Metric] = {
            "actor/pg_loss": Sum(math.nan if is_broken else -0.5),
            "actor/grad_norm": Last(math.inf if is_broken else 1.0),
            "actor/ppo_kl": Mean(1.0, 4),
            "perf/trainer_busy_s": Max(0.0),
            "actor/skipped_steps": Last(float(is_broken)),
        }
        logprobs = np.full(batch.num_tokens, -global_steps, np.float32)
        tokens = replace(TrainedTokens.none(batch.num_tokens), logprobs=logprobs)
        return StepResult(metrics, tokens, weights=f"after {global_steps + 1}")

    async def update_weights(self, global_steps: int, published: asyncio.Event) -> Report:
        assert not self.updating.locked(), "one update at a time"
        async with self.updating:
            async with self.publishing:
                await self.happen(f"publish {global_steps}")
            published.set()
            while self.update_ends_after.get(global_steps) not in (None, *self.events):
                await asyncio.sleep(0)
            await self.happen(f"live {global_steps}")
        self.live = global_steps
        return Report()

    async def advance(self, global_steps: int) -> None:
        await self.happen(f"advance {global_steps}")

    async def evaluate(self) -> Held:
        first = self.live
        await self.happen("evaluate")
        while self.evaluation_ends_after and self.evaluation_ends_after not in self.events:
            await asyncio.sleep(0)
        return Held(accuracy=len(self.events) / 100, versions=tuple(sorted({first, self.live})))

    def record_step(
        self,
        global_steps: int,
        metrics: dict[str, float],
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
        tokens: TrainedTokens | None,
        evidence: Evidence,
    ) -> None:
        self.evidence[global_steps] = evidence
        self.events.append(f"record {global_steps}")
        assert [group.prompt.ordinal for group in groups] == [2 * global_steps - 2, 2 * global_steps - 1]
        self.records[global_steps] = metrics
        self.recorded_tokens[global_steps] = tokens
        self.recorded_advantages.append([group_advantages.tolist() for group_advantages in advantages])

    def record_skipped_step(
        self, global_steps: int, reason: str, groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray]
    ) -> tuple[int, str]:
        self.events.append(f"record_skipped {global_steps}")
        self.skipped_steps += 1
        ordinals = [group.prompt.ordinal for group in groups]
        return self.skipped_steps, f"step {global_steps}, {reason}, prompts {ordinals}"

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None:
        self.events.append(f"record_evaluation {global_steps}")
        self.evaluations.append((global_steps, evaluation.accuracy))

    def state(self) -> bytes:
        return f"after {self.events[-1]}".encode()

    def is_due(self, global_steps: int) -> bool:
        return global_steps in self.due

    async def stage(self, global_steps: int, *, is_last: bool) -> None:
        await self.happen(f"stage {global_steps}")

    def commit(self, files: dict[str, bytes]) -> None:
        self.events.append(f"commit {files}")

    def gauges(self) -> dict[str, float]:
        return {"rollout/ready_groups": 7.0}


@dataclass
class Fleet:
    publishing: asyncio.Lock

    async def gauges(self) -> dict[str, float]:
        """Answer after a replica has taken the weights, as one that catches up does."""
        async with asyncio.timeout(10), self.publishing:
            pass
        return {"rollout/engine_requests": 64.0, "perf/replica_idle": 0.25}


def run(  # noqa: PLR0913
    world: World,
    *,
    total_steps: int = 2,
    interval: int = 1,
    eval_every: int = 0,
    num_ranks: int = 1,
    algorithm: AlgorithmConfig | None = None,
    max_skipped_steps: int = 3,
    first_step: int = 0,
    mini_batches: int = 1,
    epochs: int = 1,
    demonstrations: DemonstrationStream | None = None,
    replica_check: ReplicaCheck | None = None,
) -> World:
    config = Config(
        algorithm=algorithm or AlgorithmConfig(),
        trainer=TrainerConfig(
            total_steps=total_steps,
            eval_every=eval_every,
            max_skipped_steps=max_skipped_steps,
            num_ranks=num_ranks,
            mini_batches=mini_batches,
            epochs=epochs,
            layout=Layout.packed,
            tokens_per_micro_batch=8,
        ),
        weight_sync=WeightSyncConfig(interval=interval),
        sft=SftConfig(per_step=2),
    )
    loop = TrainLoop(
        config=config,
        buffer=world,
        workers=world,
        manager=world,
        evaluate=world.evaluate,
        fleet_gauges=Fleet(world.publishing).gauges,
        recorder=world,
        checkpointer=world,
        demonstrations=demonstrations,
        replica_check=replica_check,
    )
    world.end_early = loop.end_early
    try:
        asyncio.run(loop.run(first_step))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return world
