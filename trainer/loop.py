"""The consuming loop: batches in, new weights out. One loop serves every algorithm, synchronous or not."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from configs.schema import Config
from rollout.types import FloatArray, TrajectoryGroup
from trainer.advantages.credit import Credit, assign_credit, keeps_idle, needs_scores, trainable
from trainer.batch import StepBatch, assemble
from trainer.metrics import Metric, timed, to_floats
from trainer.tokens import TokenSignals, sampled_tokens
from trainer.tracking.bad_batches import SkippedStepsError, broken_rollouts, not_finite
from trainer.tracking.step_metrics import group_metrics


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

    async def skip_step(self, global_steps: int) -> dict[str, Metric]: ...


class UpdateReport(Protocol):
    def gauges(self) -> dict[str, float]: ...


class WeightUpdater(Protocol):
    @property
    def publishing(self) -> asyncio.Lock:
        """Held while the weights are read."""
        ...

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
    async def evaluate(self) -> Any:
        """The result has `versions`: `global_steps` of all its tokens, in order."""
        ...


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

    def state(self) -> bytes: ...

    def record_skipped_step(
        self,
        global_steps: int,
        reason: str,
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
    ) -> tuple[int, str]:
        """Keeps the batch. How many steps of the run have been skipped, and a sentence that says which this is."""
        ...


class TrainLoop:
    """For every optimizer step: wait for a batch, train on it, make the weights live, save where it is due, free slots.

    Consumes groups of the buffer. Produces versions of the weights. Waits for the buffer (trainer.batch_timeout_s), the
    workers (trainer.step_timeout_s) and the update (weight_sync.*_timeout_s). The rollouter goes on all the while, and
    so do evaluations.
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
        self._evaluating: asyncio.Task[None] | None = None
        self._skipped_evaluations = 0
        self._started = time.perf_counter()

    async def run(self, first_step: int = 0, *, is_evaluated: bool = True) -> None:
        """Steps first_step .. total_steps - 1. Replicas already serve version `first_step`. `is_evaluated`: whether its
        evaluation, where one is due, has been recorded; if not, it comes now, beside the steps."""
        total_steps = self._config.trainer.total_steps
        self._started = time.perf_counter()
        async with asyncio.TaskGroup() as beside:  # its end waits for an evaluation, whose error ends the steps
            if not is_evaluated:
                await self._evaluate_if_due(first_step, beside)
            for global_steps in range(first_step, total_steps):
                await self._step(global_steps)
                await self._evaluate_if_due(global_steps + 1, beside)

    async def _evaluate_if_due(self, done: int, beside: asyncio.TaskGroup) -> None:
        if self._is_due(done):
            self._start_evaluation(beside)
            await asyncio.sleep(0)  # it takes its replicas before the next step begins

    def _is_due(self, done: int) -> bool:
        """The first update at or after every `eval_every` steps; what comes before and after all is the caller's."""
        every, interval = self._config.trainer.eval_every, self._config.weight_sync.interval
        is_due = every > 0 and done // every > (done - interval) // every
        return is_due and done % interval == 0 and 0 < done < self._config.trainer.total_steps

    def _start_evaluation(self, beside: asyncio.TaskGroup) -> None:
        """Training never waits for an evaluation. One that is due while another goes on is skipped and counted: later
        it would be of another version than the one that was asked for."""
        if self._evaluating is None or self._evaluating.done():
            self._evaluating = beside.create_task(self._evaluate(), name="evaluation")
        else:
            self._skipped_evaluations += 1

    async def _evaluate(self) -> None:
        evaluation = await self._held_out.evaluate()
        self._recorder.record_evaluation(min(evaluation.versions), evaluation)

    async def _step(self, global_steps: int) -> None:
        timings: dict[str, Metric] = {}
        sync = self._config.weight_sync
        is_due = self._checkpointer.is_due(global_steps + 1)
        with timed(timings, "step"):
            with timed(timings, "wait_batch"):
                batch = await self._buffer.next_batch(global_steps)
            credit, actor, fleet = await self._train(batch.groups, global_steps, timings)
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
            **actor,
            **to_floats(timings),
            **update,
            **self._buffer.gauges(),
            **fleet,
            **self._workers.gauges(),
            **self._checkpointer.gauges(),
            "staleness/masked_tokens": float(batch.masked_tokens),
            "eval/skipped": float(self._skipped_evaluations),
            "timing_s/elapsed": time.perf_counter() - self._started,
        }
        metrics = _with_rates(metrics, len(batch.groups))
        self._recorder.record_step(global_steps + 1, metrics, batch.groups, credit.advantages)
        if is_due:
            self._checkpointer.commit({"recorder": self._recorder.state()})

    async def _train(
        self, groups: Sequence[TrajectoryGroup], global_steps: int, timings: dict[str, Metric]
    ) -> tuple[Credit, dict[str, float], dict[str, float]]:
        """One optimizer step: what was learned, metrics of workers and fleet. A step that NaN or infinity would break
        is not taken: its batch is kept, and counts against trainer.max_skipped_steps."""
        broken = broken_rollouts(groups)
        if broken is None:
            credit, step_batch = await self._prepare(groups, global_steps, timings)
        else:
            step_batch = None
            zeros = [np.zeros(len(group.trajectories), np.float32) for group in groups]
            credit = Credit(tokens=sampled_tokens(groups, global_steps), advantages=zeros, metrics={})
        async with self._manager.publishing:
            with timed(timings, "train_step"):
                if step_batch is None:
                    training = self._workers.skip_step(global_steps)
                else:
                    training = self._workers.train_step(step_batch, global_steps)
                metrics, fleet = await asyncio.gather(training, self._fleet.gauges())
        actor = to_floats(metrics)
        if actor["actor/skipped_steps"]:
            reason = broken or not_finite(actor)
            count, what = self._recorder.record_skipped_step(global_steps + 1, reason, groups, credit.advantages)
            allowed = self._config.trainer.max_skipped_steps
            if count > allowed:
                raise SkippedStepsError(f"{count} steps were skipped, trainer.max_skipped_steps={allowed}; {what}")
        return credit, actor, fleet

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
