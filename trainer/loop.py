"""The consuming loop: batches in, new weights out. One loop serves every algorithm, synchronous or not."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from configs.schema import Config
from rollout.types import FloatArray, TrajectoryGroup
from trainer.batch import StepBatch, assemble
from trainer.batch_metrics import group_metrics
from trainer.credit import Credit, assign_credit, keeps_idle, needs_scores
from trainer.metrics import Metric, timed, to_floats
from trainer.scores import trainable
from trainer.signals import TokenSignals, sampled_tokens


class GroupBatch(Protocol):
    @property
    def groups(self) -> tuple[TrajectoryGroup, ...]: ...

    @property
    def masked_tokens(self) -> int: ...


class GroupSource(Protocol):
    """The buffer, as the trainer sees it."""

    async def next_batch(self, global_steps: int) -> GroupBatch: ...

    async def advance(self, global_steps: int) -> None: ...

    def gauges(self) -> dict[str, float]: ...


class Workers(Protocol):
    async def score(self, batch: StepBatch) -> dict[str, FloatArray]: ...

    async def train_step(self, batch: StepBatch, global_steps: int) -> dict[str, Metric]: ...

    def gauges(self) -> dict[str, float]: ...


class UpdateReport(Protocol):
    def gauges(self) -> dict[str, float]: ...


class WeightUpdater(Protocol):
    async def update_weights(self, global_steps: int) -> UpdateReport: ...


class Saver(Protocol):
    """The checkpointer."""

    def is_due(self, global_steps: int) -> bool: ...

    async def stage(self, global_steps: int) -> None:
        """Takes what is of this moment, while nothing trains and before slots are freed."""
        ...

    def commit(self, files: dict[str, bytes]) -> None:
        """Writes the rest beside the training, once the step is recorded. `files`: more to save, by name."""
        ...

    def gauges(self) -> dict[str, float]: ...


class HeldOut(Protocol):
    async def evaluate(self) -> Any: ...


class Fleet(Protocol):
    async def gauges(self) -> dict[str, float]:
        """Metrics of replicas and router since the last call."""
        ...


class Recorder(Protocol):
    def record_step(
        self,
        global_steps: int,
        metrics: dict[str, float],
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
    ) -> None: ...

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None: ...

    def snapshot(self) -> bytes: ...


class TrainLoop:
    """For every optimizer step: wait for a batch, train on it, make the weights live, save where it is due, free slots.

    Consumes groups of the buffer. Produces versions of the weights. Waits for the buffer (trainer.batch_timeout_s), the
    workers (trainer.step_timeout_s) and the update (weight_sync.*_timeout_s). The rollouter goes on all the while.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        config: Config,
        buffer: GroupSource,
        workers: Workers,
        manager: WeightUpdater,
        held_out: HeldOut,
        fleet: Fleet,
        recorder: Recorder,
        checkpointer: Saver,
    ):
        self._config = config
        self._buffer = buffer
        self._workers = workers
        self._manager = manager
        self._held_out = held_out
        self._fleet = fleet
        self._recorder = recorder
        self._checkpointer = checkpointer
        self._started = time.perf_counter()

    async def run(self) -> None:
        """Steps 0 .. total_steps - 1. Replicas already serve version 0."""
        total_steps = self._config.trainer.total_steps
        eval_every = self._config.trainer.eval_every
        self._started = time.perf_counter()
        for global_steps in range(total_steps):
            await self._step(global_steps)
            done = global_steps + 1
            if eval_every and done % eval_every == 0 and done < total_steps:
                # Inline, so that no update comes in between: one version answers all. Rollouts go on beside it.
                self._recorder.record_evaluation(done, await self._held_out.evaluate())

    async def _step(self, global_steps: int) -> None:
        timings: dict[str, Metric] = {}
        sync = self._config.weight_sync
        is_due = self._checkpointer.is_due(global_steps + 1)
        with timed(timings, "step"):
            with timed(timings, "wait_batch"):
                batch = await self._buffer.next_batch(global_steps)
            credit, step_batch = await self._prepare(batch.groups, global_steps, timings)
            with timed(timings, "train_step"):
                actor, fleet = await asyncio.gather(
                    self._workers.train_step(step_batch, global_steps), self._fleet.gauges()
                )
            update: dict[str, float] = {}
            if (global_steps + 1) % sync.interval == 0:
                with timed(timings, "update_weights"):
                    report = await self._manager.update_weights(global_steps + 1)
                update = report.gauges()
                if is_due:
                    with timed(timings, "checkpoint"):
                        await self._checkpointer.stage(global_steps + 1)
                await self._buffer.advance(global_steps + 1)
        metrics = {
            **group_metrics(batch.groups, credit.advantages, global_steps, sync.interval),
            **credit.metrics,
            **to_floats(actor),
            **to_floats(timings),
            **update,
            **self._buffer.gauges(),
            **fleet,
            **self._workers.gauges(),
            **self._checkpointer.gauges(),
            "staleness/masked_tokens": float(batch.masked_tokens),
            "timing_s/elapsed": time.perf_counter() - self._started,
        }
        metrics = _with_rates(metrics, len(batch.groups))
        self._recorder.record_step(global_steps + 1, metrics, batch.groups, credit.advantages)
        if is_due:
            self._checkpointer.commit({"recorder": self._recorder.snapshot()})

    async def _prepare(
        self, groups: Sequence[TrajectoryGroup], global_steps: int, timings: dict[str, Metric]
    ) -> tuple[Credit, StepBatch]:
        """What every token learns, and the micro-batches that carry it."""
        algorithm = self._config.algorithm
        with timed(timings, "assemble"):
            tokens, scores = sampled_tokens(groups, global_steps), {}
        if needs_scores(algorithm):
            with timed(timings, "score"):
                scores = await self._workers.score(self._assemble(groups, tokens, keep_idle=True))
        with timed(timings, "assemble"):
            credit = assign_credit(groups, tokens, scores, self._config, global_steps)
            learning = trainable(groups, algorithm.mask_truncated)
            return credit, self._assemble(learning, credit.tokens, keep_idle=keeps_idle(algorithm))

    def _assemble(self, groups: Sequence[TrajectoryGroup], tokens: TokenSignals, *, keep_idle: bool) -> StepBatch:
        trainer = self._config.trainer
        return assemble(
            groups,
            tokens,
            layout=trainer.layout,
            num_ranks=trainer.num_ranks,
            tokens_per_micro_batch=trainer.tokens_per_micro_batch,
            keep_idle=keep_idle,
        )


def _with_rates(metrics: dict[str, float], num_groups: int) -> dict[str, float]:
    seconds = metrics["timing_s/step"]
    return metrics | {
        "perf/throughput": metrics["perf/tokens"] / seconds,
        "perf/groups_per_second": num_groups / seconds,
        "perf/trainer_idle": 1 - metrics["perf/trainer_busy_s"] / seconds,
    }
