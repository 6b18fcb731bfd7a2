"""TrainLoop on fakes that write down what they are asked: order, intervals, evaluations, errors, metrics."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from configs.schema import AlgorithmConfig, Config, Layout, TrainerConfig, WeightSyncConfig
from rollout.types import FloatArray, TrajectoryGroup
from tests.reference import make_group, make_trajectory
from trainer.advantage import ScoredGroup
from trainer.batch import StepBatch
from trainer.loop import TrainLoop
from trainer.metrics import Max, Mean, Metric, Sum


@dataclass(frozen=True)
class Batch:
    groups: tuple[TrajectoryGroup, ...]
    masked_tokens: int = 3


@dataclass(frozen=True)
class Held:
    accuracy: float


class Report:
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
    batches: list[StepBatch] = field(default_factory=list)
    scored: list[StepBatch] = field(default_factory=list)
    records: dict[int, dict[str, float]] = field(default_factory=dict)
    recorded_advantages: list[list[list[float]]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    async def happen(self, event: str) -> None:
        self.events.append(event)
        await asyncio.sleep(0)
        if event == self.fails:
            raise RuntimeError(f"{event} broke")

    async def next_batch(self, global_steps: int) -> Batch:
        await self.happen(f"next_batch {global_steps}")
        trajectories = [
            make_trajectory([5, 6], [7, 8, 9], reward=float(i == 0), finish_reason=reason)
            for i, reason in enumerate(self.finish_reasons)
        ]
        return Batch((make_group(2 * global_steps, trajectories), make_group(2 * global_steps + 1, trajectories)))

    async def score(self, batch: StepBatch) -> dict[str, FloatArray]:
        """The KL of every trajectory's first token is its place in the step, at later tokens it is 0."""
        self.events.append("score")
        self.scored.append(batch)
        kl = np.zeros(batch.num_tokens, np.float32)
        kl[::3] = np.arange(len(kl) // 3)
        return {"reference_logprobs": -np.arange(batch.num_tokens, dtype=np.float32), "kl": kl}

    async def train_step(self, batch: StepBatch, global_steps: int) -> dict[str, Metric]:
        await self.happen(f"train_step {global_steps}")
        self.batches.append(batch)
        return {"actor/pg_loss": Sum(-0.5), "actor/ppo_kl": Mean(1.0, 4), "perf/trainer_busy_s": Max(0.0)}

    async def update_weights(self, global_steps: int) -> Report:
        await self.happen(f"update_weights {global_steps}")
        return Report()

    async def advance(self, global_steps: int) -> None:
        await self.happen(f"advance {global_steps}")

    async def evaluate(self) -> Held:
        await self.happen("evaluate")
        return Held(accuracy=len(self.events) / 100)

    def record_step(
        self,
        global_steps: int,
        metrics: dict[str, float],
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
    ) -> None:
        self.events.append(f"record {global_steps}")
        assert [group.prompt.ordinal for group in groups] == [2 * global_steps - 2, 2 * global_steps - 1]
        self.records[global_steps] = metrics
        self.recorded_advantages.append([group_advantages.tolist() for group_advantages in advantages])

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None:
        self.events.append(f"record_evaluation {global_steps}")
        self.evaluations.append((global_steps, evaluation.accuracy))

    def snapshot(self) -> bytes:
        return f"after {self.events[-1]}".encode()

    def is_due(self, global_steps: int) -> bool:
        return global_steps in self.due

    async def stage(self, global_steps: int) -> None:
        await self.happen(f"stage {global_steps}")

    def commit(self, files: dict[str, bytes]) -> None:
        self.events.append(f"commit {files}")

    def gauges(self) -> dict[str, float]:
        return {"rollout/ready_groups": 7.0}


class Fleet:
    async def gauges(self) -> dict[str, float]:
        return {"rollout/engine_requests": 64.0, "perf/replica_idle": 0.25}


def run(
    world: World,
    *,
    total_steps: int = 2,
    interval: int = 1,
    eval_every: int = 0,
    num_ranks: int = 1,
    algorithm: AlgorithmConfig | None = None,
) -> World:
    config = Config(
        algorithm=algorithm or AlgorithmConfig(),
        trainer=TrainerConfig(
            total_steps=total_steps,
            eval_every=eval_every,
            num_ranks=num_ranks,
            layout=Layout.padded,
            tokens_per_micro_batch=8,
        ),
        weight_sync=WeightSyncConfig(interval=interval),
    )
    loop = TrainLoop(
        config=config,
        buffer=world,
        workers=world,
        manager=world,
        held_out=world,
        fleet=Fleet(),
        recorder=world,
        checkpointer=world,
    )
    asyncio.run(loop.run())
    return world


def test_slots_are_freed_after_the_weights_are_live_and_the_step_is_recorded_last() -> None:
    assert run(World()).events == [
        "next_batch 0",
        "train_step 0",
        "update_weights 1",
        "advance 1",
        "record 1",
        "next_batch 1",
        "train_step 1",
        "update_weights 2",
        "advance 2",
        "record 2",
    ]


def test_an_interval_updates_and_advances_only_when_it_is_full() -> None:
    world = run(World(), total_steps=6, interval=3)
    changes = [event for event in world.events if event.startswith(("update", "advance"))]
    assert changes == ["update_weights 3", "advance 3", "update_weights 6", "advance 6"]
    assert list(world.records) == [1, 2, 3, 4, 5, 6]
    updated = [step for step, metrics in world.records.items() if "weight_sync/pause_ms" in metrics]
    assert updated == [step for step, metrics in world.records.items() if "timing_s/update_weights" in metrics]
    assert updated == [3, 6]
    # Staleness is counted in updates: the groups are of version 0, and each version lasts three steps.
    assert [metrics["staleness/max"] for metrics in world.records.values()] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("total_steps", "eval_every", "expected"), [(6, 2, [2, 4]), (5, 2, [2, 4]), (3, 0, []), (3, 1, [1, 2]), (3, 3, [])]
)
def test_evaluation_steps_leave_the_last_to_the_caller(total_steps: int, eval_every: int, expected: list[int]) -> None:
    world = run(World(), total_steps=total_steps, eval_every=eval_every)
    assert [step for step, _ in world.evaluations] == expected


def test_the_evaluation_is_of_the_weights_that_have_just_gone_live() -> None:
    events = run(World(), total_steps=3, eval_every=2).events
    place = events.index("evaluate")
    assert events[place - 3 : place + 3] == [
        "update_weights 2",
        "advance 2",
        "record 2",
        "evaluate",
        "record_evaluation 2",
        "next_batch 2",
    ]


@pytest.mark.parametrize(
    "fails", ["next_batch 1", "train_step 1", "update_weights 2", "stage 2", "advance 2", "evaluate"]
)
def test_an_error_anywhere_ends_the_run_at_once(fails: str) -> None:
    world = World(fails=fails, due=(2,))
    with pytest.raises(RuntimeError, match=f"{fails} broke"):
        run(world, total_steps=4, eval_every=2)
    assert world.events[-1] == fails
    assert list(world.records) == ([1, 2] if fails == "evaluate" else [1])


@pytest.mark.parametrize("total_steps", [1, 3])
def test_every_step_has_every_family_of_metrics(total_steps: int) -> None:
    world = run(World(), total_steps=total_steps, num_ranks=2)
    assert list(world.records) == list(range(1, total_steps + 1))
    for metrics in world.records.values():
        assert metrics["critic/rewards/mean"] == 0.25
        assert metrics["actor/pg_loss"] == -0.5
        assert metrics["actor/ppo_kl"] == 0.25
        assert metrics["rollout/ready_groups"] == 7
        assert metrics["rollout/engine_requests"] == 64
        assert metrics["weight_sync/pause_ms"] == 12
        assert metrics["staleness/masked_tokens"] == 3
        assert metrics["perf/tokens"] == 2 * 4 * 5
        assert metrics["perf/replica_idle"] == 0.25
        assert metrics["perf/trainer_idle"] == 1
        step_s = metrics["timing_s/step"]
        assert metrics["perf/throughput"] == pytest.approx(40 / step_s)
        assert metrics["perf/groups_per_second"] == pytest.approx(2 / step_s)
        parts = [metrics[f"timing_s/{part}"] for part in ("wait_batch", "assemble", "train_step", "update_weights")]
        assert all(part > 0 for part in parts)
        assert sum(parts) <= step_s <= metrics["timing_s/elapsed"]
        assert {"staleness/mean", "staleness/max", "response_length/mean"} <= metrics.keys()
        assert all(type(value) is float for value in metrics.values())


OWN = "tests.unit.test_train_loop:twice_the_reward_less_one"


def twice_the_reward_less_one(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[FloatArray]:
    return [2 * group.rewards - 1 for group in groups]


@pytest.mark.parametrize(
    ("algorithm", "advantages"),
    [
        (AlgorithmConfig(), [1.499997] + [-0.499999] * 3),
        (AlgorithmConfig(normalize_by_std=False), [0.75] + [-0.25] * 3),
        (AlgorithmConfig(advantage="rloo"), [1.0] + [-1 / 3] * 3),
        (AlgorithmConfig(advantage=OWN), [1.0] + [-1.0] * 3),
    ],
)
def test_workers_train_on_the_groups_advantages(algorithm: AlgorithmConfig, advantages: list[float]) -> None:
    world = run(World(), total_steps=1, num_ranks=2, algorithm=algorithm)
    assert world.recorded_advantages[0] == [pytest.approx(advantages)] * 2
    (batch,) = world.batches
    assert batch.num_tokens == 2 * 4 * 3
    weights = [float(w) for rank in batch.micro_batches for b in rank for w in b.tokens.loss_weights]
    assert weights == pytest.approx([1 / 24] * 24)
    # Eight rows of four tokens, two to a micro-batch, on two ranks.
    assert [[b.input_ids.shape for b in rank] for rank in batch.micro_batches] == [[(2, 4)] * 2] * 2
    trained = [float(a) for rank in batch.micro_batches for b in rank for a in b.tokens.advantages]
    assert sorted(trained) == pytest.approx(sorted(advantages * 2 * 3))


def test_truncated_trajectories_are_neither_computed_nor_counted_when_they_are_masked() -> None:
    world = World(finish_reasons=["length", "stop", "stop", "length"])
    run(world, total_steps=1, algorithm=AlgorithmConfig(mask_truncated=True))
    (batch,) = world.batches
    assert batch.num_tokens == 2 * 2 * 3
    trained = [float(a) for rank in batch.micro_batches for b in rank for a in b.tokens.advantages]
    assert trained == pytest.approx([-0.499999] * 2 * 2 * 3), "the reward of the first is still in the baseline"


def test_with_a_kl_in_the_reward_the_workers_are_asked_first_and_the_step_learns_from_their_answer() -> None:
    """Rewards 1, 0, 0, 0 minus 0.5 times 0, 1, 2, 3 and then 4, 5, 6, 7."""
    algorithm = AlgorithmConfig(normalize_by_std=False, kl_reward_coef=0.5)
    world = run(World(), total_steps=1, num_ranks=2, algorithm=algorithm)
    assert world.events == ["next_batch 0", "score", "train_step 0", "update_weights 1", "advance 1", "record 1"]
    expected = [1.5, 0, -0.5, -1]
    assert world.recorded_advantages[0] == [pytest.approx(expected)] * 2
    (asked,), (trained,) = world.scored, world.batches
    assert asked.num_tokens == sum(len(b.index) for rank in asked.micro_batches for b in rank) == 24
    for micro_batch in (b for rank in trained.micro_batches for b in rank):
        tokens = micro_batch.tokens
        assert tokens.reference_logprobs is not None
        assert tokens.reference_logprobs.tolist() == (-micro_batch.index).tolist()
        assert tokens.advantages.tolist() == pytest.approx([expected[index // 3 % 4] for index in micro_batch.index])
    assert sum(len(b.index) for rank in trained.micro_batches for b in rank) == 18, "without the advantage of 0"
    assert world.records[1]["actor/reward_kl_penalty"] == pytest.approx(28 / 24)
    assert world.records[1]["timing_s/score"] > 0
