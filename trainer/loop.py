"""The training loop: batches in, new weights out. One loop serves every algorithm, synchronous or asynchronous."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from configs.schema import Config
from rollout.events.event import Emit, nobody
from rollout.events.kinds import GroupTrained
from rollout.types import FloatArray, TrainBatch, TrajectoryGroup
from trainer.advantages.credit import Credit, assign_credit, needs_scores, no_credit, trainable
from trainer.batch import StepBatch, assemble
from trainer.checkpoint.checkpointer import Checkpointer, is_first_update_after
from trainer.metrics import to_floats
from trainer.mini_batches import mini_batched
from trainer.step_parts import StepParts
from trainer.supervised.demonstrations import DemonstrationStream, beside
from trainer.tokens import TokenSignals, TrainedTokens, sampled_tokens
from trainer.tracking.bad_batches import SkippedStepsError, broken_rollouts, not_finite
from trainer.tracking.events.kinds import BatchAssembled, EvaluationStarted, StepPart, UpdateEnded, UpdateStarted
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.step_metrics import group_metrics
from trainer.worker.recovery import RecoveringWorkers, WeightUpdater
from weight_sync.protocol import UpdateReport


class GroupSource(Protocol):
    """The trajectory buffer of the rollouts."""

    async def next_batch(self, global_steps: int) -> TrainBatch: ...

    async def advance(self, global_steps: int) -> None: ...

    def gauges(self) -> dict[str, float]: ...


class HeldOut(Protocol):
    """The evaluator. Its result has `versions`: `global_steps` of all sampled tokens, ascending."""

    async def evaluate(self) -> Any: ...


class Fleet(Protocol):
    """The replicas."""

    async def gauges(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step that is not settled yet."""

    done: int
    """Steps taken, this one included."""
    groups: Sequence[TrajectoryGroup]
    advantages: Sequence[FloatArray]
    """By group, [G]."""
    metrics: dict[str, float]
    tokens: TrainedTokens | None
    """None where nobody records them."""


@dataclass(kw_only=True, eq=False)
class TrainLoop:
    """Takes the steps of a run, each on a batch of its own.

    Consumes groups of the buffer and produces versions of the weights. A step begins as soon as its batch is there and
    the weights of the step before are published: while it trains, the replicas stage and commit them, and the step
    before is *settled*, which ends with its record. Steps settle in order, one at a time. Waits for the buffer
    (trainer.batch_timeout_s), the train workers (trainer.step_timeout_s) and the weight update
    (weight_sync.*_timeout_s). Rollouts and evaluations run concurrently.

    Example, the order of events of one step with weight_sync.interval=1:
        buffer.next_batch(7)
        workers.train_step(batch, 7)
        ...                         # step 7 is settled
        checkpointer.stage(8)       # if a checkpoint is due
        manager.update_weights(8)   # once the weights are published, step 8 begins, and beside it:
        buffer.advance(8)           # frees the slots of what was trained
        recorder.record_step(8, ...)
        checkpointer.commit(...)
    """

    config: Config
    buffer: GroupSource
    """Yields the groups of each step, and frees their slots once their weights are live."""
    workers: RecoveringWorkers
    manager: WeightUpdater
    """Makes the workers' weights live on the replicas; `publishing` is locked while it reads them."""
    held_out: HeldOut
    fleet: Fleet
    recorder: RunRecorder
    checkpointer: Checkpointer
    emit: Emit = nobody
    """Takes the events of the training."""
    demonstrations: DemonstrationStream | None = None
    """With algorithm.ce_coef: what is learned beside the groups."""
    _settling: asyncio.Task[None] | None = field(default=None, init=False)
    _evaluating: asyncio.Task[None] | None = field(default=None, init=False)
    _skipped_evaluations: int = field(default=0, init=False)
    _started: float = field(default=0.0, init=False)

    async def run(self, first_step: int = 0, *, is_evaluated: bool = True) -> None:
        """Take the steps first_step .. total_steps - 1. The replicas must serve version `first_step` already.

        Args:
            is_evaluated: False if version `first_step` still lacks the evaluation that is due, after a resume.
        """
        self._started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:  # waits for the last step and evaluation; an error of theirs ends it
            if not is_evaluated:
                await self._evaluate_if_due(first_step, tasks)
            for global_steps in range(first_step, self.config.trainer.total_steps):
                await self._step(global_steps, tasks)

    async def _step(self, global_steps: int, tasks: asyncio.TaskGroup) -> None:
        """Take one step: train on a batch, and publish the weights. `global_steps` were taken before it."""
        done = global_steps + 1
        parts = StepParts(done, self.emit)
        with parts.whole():
            with parts.part(StepPart.wait):
                batch = await self.buffer.next_batch(global_steps)
            self._tell_batch(done, batch.groups)
            broken = broken_rollouts(batch.groups)
            if broken is None:
                step_batch, credit = await self._assemble(batch.groups, global_steps, parts)
            else:
                step_batch, credit = None, no_credit(batch.groups)
            advantages = credit.advantages
            (actor, tokens), fleet = await asyncio.gather(
                self._train(step_batch, global_steps, parts), self.fleet.gauges()
            )  # outside the publishing lock, which a slow replica must not hold
            with parts.part(StepPart.update):
                await self._settled()
            if actor["actor/skipped_steps"]:
                self._record_skipped(done, broken or not_finite(actor), batch.groups, advantages)
            update = await self._publish(parts, tasks)
        of_groups = group_metrics(batch.groups, advantages, global_steps, self.config.weight_sync.interval)
        seconds = parts.timings["timing_s/step"]
        has_learned = step_batch is not None and actor["actor/skipped_steps"] < len(step_batch.optimizer_steps)
        trained = step_batch.num_trained if step_batch is not None and has_learned else 0
        metrics = {
            **of_groups,
            **credit.metrics,
            **actor,
            **parts.timings,
            **fleet,
            "staleness/masked_tokens": float(batch.masked_tokens),
            "perf/trained_tokens": float(trained),
            "perf/throughput/trained": trained / seconds,
            "perf/groups_per_second": len(batch.groups) / seconds,
            "perf/trainer_idle": 1 - actor["perf/trainer_busy_s"] / seconds,
        }
        tokens = None if tokens is None else tokens.first(len(credit.tokens.targets))  # demonstrations follow
        step = TakenStep(done, batch.groups, advantages, metrics, tokens)
        self._settling = tasks.create_task(self._settle(step, update, tasks), name=f"settle-{done}")

    async def _publish(self, parts: StepParts, tasks: asyncio.TaskGroup) -> asyncio.Task[UpdateReport] | None:
        """Every weight_sync.interval steps: stage a checkpoint if one is due, and publish the weights. Returns the
        update, the rest of which is under way."""
        done = parts.done
        if done % self.config.weight_sync.interval:
            return None
        is_last = done == self.config.trainer.total_steps
        if not is_last:
            await self._stage_if_due(parts)
        published = asyncio.Event()
        with parts.part(StepPart.update):
            update = tasks.create_task(self._update(done, published), name=f"update-{done}")
            await published.wait()
        if is_last:  # no step is kept waiting, and workers that start again in the update would lose what is staged
            await update
            await self._stage_if_due(parts)
        return update

    async def _update(self, done: int, published: asyncio.Event) -> UpdateReport:
        self.emit(UpdateStarted(global_steps=done))
        report = await self.manager.update_weights(done, published)
        names = tuple(update.name for update in report.replicas)
        self.emit(UpdateEnded(global_steps=done, replicas=names, failures=report.failures))
        return report

    async def _stage_if_due(self, parts: StepParts) -> None:
        """Copy the state after the step. The slots of what it was trained on are still held, so the rollouts that
        are saved with it have every prompt in one place."""
        if self.checkpointer.is_due(parts.done):
            with parts.part(StepPart.checkpoint):
                await self.checkpointer.stage(parts.done)

    def _tell_batch(self, done: int, groups: Sequence[TrajectoryGroup]) -> None:
        ordinals = tuple(group.prompt.ordinal for group in groups)
        num_tokens = sum(group.num_tokens for group in groups)
        self.emit(BatchAssembled(global_steps=done, ordinals=ordinals, num_tokens=num_tokens))

    async def _settled(self) -> None:
        """Wait until the step before is settled: one update can be under way."""
        if self._settling is not None:
            await self._settling

    async def _settle(
        self, step: TakenStep, update: asyncio.Task[UpdateReport] | None, tasks: asyncio.TaskGroup
    ) -> None:
        """Wait until the step's weights are live, then free the slots, record the step and start what it makes due."""
        of_update = {}
        if update is not None:
            of_update = (await update).gauges()
            await self.buffer.advance(step.done)
        metrics = {
            **step.metrics,
            **of_update,
            **self.buffer.gauges(),
            **self.workers.gauges(),
            **self.checkpointer.gauges(),
            "eval/skipped": float(self._skipped_evaluations),
            "timing_s/elapsed": time.perf_counter() - self._started,
        }
        for group in step.groups:
            self.emit(GroupTrained(global_steps=step.done, ordinal=group.prompt.ordinal))
        self.recorder.record_step(step.done, metrics, step.groups, step.advantages, step.tokens)
        if self.checkpointer.is_due(step.done):
            self.checkpointer.commit({"recorder": self.recorder.state()})
        await self._evaluate_if_due(step.done, tasks)

    async def _assemble(
        self, groups: Sequence[TrajectoryGroup], global_steps: int, parts: StepParts
    ) -> tuple[StepBatch, Credit]:
        """Return the micro-batches with what every token learns, and the credit of the groups' own."""
        algorithm = self.config.algorithm
        with parts.part(StepPart.assemble):
            tokens, scores = sampled_tokens(groups, global_steps, self.config.weight_sync.interval), {}
        if needs_scores(algorithm):
            with parts.part(StepPart.score):
                async with self.manager.publishing:  # workers that score cannot publish: who wants them to waits here
                    scores = await self.workers.score(self._whole(groups, tokens))
        with parts.part(StepPart.assemble):
            credit = assign_credit(groups, tokens, scores, self.config, global_steps)
            trained, tokens = trainable(groups, algorithm.mask_truncated), credit.tokens
            if self.demonstrations is not None:
                given = self.demonstrations.batch(global_steps, self.config.sft.per_step)
                trained, tokens = beside(trained, tokens, given)
            step_batch = mini_batched(trained, tokens, self.config, global_steps)
        return step_batch, credit

    def _whole(self, groups: Sequence[TrajectoryGroup], tokens: TokenSignals) -> StepBatch:
        """The micro-batches of all the tokens, to score them."""
        trainer = self.config.trainer
        return assemble(
            groups,
            tokens,
            layout=trainer.layout,
            num_ranks=trainer.data_parallel,
            tokens_per_micro_batch=trainer.tokens_per_micro_batch,
            keep_idle=True,
        )

    async def _train(
        self, step_batch: StepBatch | None, global_steps: int, parts: StepParts
    ) -> tuple[dict[str, float], TrainedTokens | None]:
        """Take the batch's optimizer steps on the workers, while nobody reads their weights."""
        async with self.manager.publishing:
            with parts.part(StepPart.train):
                result = await self.workers.train_step(step_batch, global_steps)
        return to_floats(result.metrics), result.tokens

    def _record_skipped(
        self, done: int, reason: str, groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray]
    ) -> None:
        """Keep the batch of a step that NaN or infinity broke. Raise past trainer.max_skipped_steps."""
        count, sentence = self.recorder.record_skipped_step(done, reason, groups, advantages)
        allowed = self.config.trainer.max_skipped_steps
        if count > allowed:
            raise SkippedStepsError(f"{count} steps were skipped, trainer.max_skipped_steps={allowed}; {sentence}")

    async def _evaluate_if_due(self, done: int, tasks: asyncio.TaskGroup) -> None:
        """Start the evaluation of version `done` if it is due; the caller evaluates the first and the last version.

        An evaluation that is due while another still runs is skipped and counted: if it started later, it would
        evaluate another version.
        """
        trainer = self.config.trainer
        is_due = is_first_update_after(trainer.eval_every, done, self.config.weight_sync.interval)
        if not (is_due and 0 < done < trainer.total_steps):
            return
        if self._evaluating is None or self._evaluating.done():
            self.emit(EvaluationStarted(global_steps=done))
            self._evaluating = tasks.create_task(self._evaluate(), name="evaluation")
            await asyncio.sleep(0)  # it takes its replicas before the next update begins
        else:
            self._skipped_evaluations += 1

    async def _evaluate(self) -> None:
        evaluation = await self.held_out.evaluate()
        self.recorder.record_evaluation(min(evaluation.versions), evaluation)
