"""The training loop: batches in, new weights out.

One loop serves every algorithm, synchronous or asynchronous, and supervised fine-tuning too: there the source of the
groups is a set of conversations, and no replica waits for the weights.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from configs.schema import Config
from rollout.events.event import Emit, nobody
from rollout.events.kinds import GroupTrained
from rollout.types import FloatArray, TrainBatch, TrajectoryGroup
from trainer.advantages.credit import Credit
from trainer.batch import StepBatch, StepResult
from trainer.batch_check import BatchCheck
from trainer.checkpoint.checkpointer import Checkpointer, is_first_update_after, newest_update_after
from trainer.metrics import timed, to_floats
from trainer.old_logprobs import EarlyScores, MixedBatch, OldLogprobs
from trainer.ports import Evaluate, GroupSource, ReplicaCheck, WeightUpdater
from trainer.step import StepAssembler
from trainer.supervised.demonstrations import DemonstrationStream
from trainer.tokens import TrainedTokens
from trainer.tracking.events.kinds import (
    BatchAssembled,
    EvaluationStarted,
    StepPart,
    StepPartEnded,
    StepPartStarted,
    UpdateEnded,
    UpdateStarted,
)
from trainer.tracking.proof import Evidence
from trainer.tracking.recorder import RECORDER, RunRecorder
from trainer.tracking.step_metrics import group_metrics
from trainer.worker.recovery import RecoveringWorkers
from weight_sync.protocol import UpdateReport

TIMINGS = {StepPart.wait: "wait_batch", StepPart.train: "train_step", StepPart.update: "update_weights"}
"""The names of parts in `timing_s/<name>`. Others have the part's own name."""

LOOK_S = 0.05
"""The seconds between two looks at the groups that have come, while a batch is waited for."""


class SkippedStepsError(RuntimeError):
    """More steps were skipped than trainer.max_skipped_steps. The message names step, batch and prompts."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of one step, each told as events and timed.

    Example:
        parts = StepParts(7, emit)
        with parts.part(StepPart.wait):
            batch = await buffer.next_batch(6)
        parts.timings   # {"timing_s/wait_batch": 0.21}
    """

    done: int
    """The number of steps taken, this one included."""
    emit: Emit
    timings: dict[str, float] = field(default_factory=dict)
    """`timing_s/<name>` -> seconds so far, summed where a part comes twice."""

    @contextmanager
    def part(self, part: StepPart) -> Iterator[None]:
        """Count the seconds of the block as this part of the step."""
        self.emit(StepPartStarted(global_steps=self.done, part=part))
        with timed(self.timings, TIMINGS.get(part, part.value)):
            yield
        self.emit(StepPartEnded(global_steps=self.done, part=part))


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step that is trained and not settled yet."""

    done: int
    """The number of steps taken, this one included."""
    groups: Sequence[TrajectoryGroup]
    advantages: Sequence[FloatArray]
    """One array [G] for each group."""
    metrics: dict[str, float]
    tokens: TrainedTokens | None
    """None where trainer.record_tokens is off."""
    weights: str
    """The digest of the weights after the step."""


@dataclass(kw_only=True, eq=False)
class TrainLoop:
    """Takes the steps of a run, each on a batch of its own.

    Consumes groups of the buffer and produces versions of the weights. A step begins as soon as its batch is there and
    the weights of the step before are published: while it trains, the replicas stage and commit them, and the step
    before is *settled*, which ends with its record. Steps settle in order, one at a time. Waits for the buffer
    (trainer.batch_timeout_s), the train workers (trainer.step_timeout_s) and the weight update
    (weight_sync.*_timeout_s). Rollouts and evaluations run concurrently.

    Without a `manager` the run is supervised: the groups are demonstrations, nothing is sampled or published, and
    nothing runs beside the steps, because the evaluation needs the train workers itself.

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
    """The source of the groups of each step. Their slots are freed once the weights trained on them are live."""
    workers: RecoveringWorkers
    manager: WeightUpdater | None
    """The way of the weights to the replicas; `publishing` is locked while it reads them. None: there are no
    replicas."""
    evaluate: Evaluate | None
    """The evaluation. None: nothing is held out."""
    fleet_gauges: Callable[[], Awaitable[dict[str, float]]] | None
    """Returns metrics of the replicas. None: there are none."""
    recorder: RunRecorder
    checkpointer: Checkpointer
    emit: Emit = nobody
    """The listener for events of the training."""
    demonstrations: DemonstrationStream | None = None
    """The conversations that are learned beside the groups, with algorithm.ce_coef."""
    replica_check: ReplicaCheck | None = None
    """The comparison of replicas with the trainer, after the updates that it chooses."""
    snapshot: str = RECORDER
    """The name of the recorder's state in a checkpoint."""
    _assembler: StepAssembler = field(init=False)
    _early: EarlyScores | None = field(default=None, init=False)
    _settling: asyncio.Task[None] | None = field(default=None, init=False)
    _evaluating: asyncio.Task[None] | None = field(default=None, init=False)
    _skipped_evaluations: int = field(default=0, init=False)
    _started: float = field(default=0.0, init=False)
    _is_to_end: bool = field(default=False, init=False)
    has_ended_early: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._batch_check = BatchCheck(self.config)
        self._assembler = StepAssembler(
            config=self.config,
            score=self._score,
            old_logprobs=self._score_old,
            demonstrations=self.demonstrations,
            is_supervised=self.manager is None,
        )
        if self.manager is not None and self.config.algorithm.needs_old_versions:
            self._early = EarlyScores(self.config)

    async def run(self, first_step: int = 0) -> None:
        """Take the steps first_step .. total_steps - 1. The replicas must serve version `first_step` already.

        After a resume, that version is evaluated first if an evaluation that was due has not ended before.
        """
        self._started = time.perf_counter()
        due = newest_update_after(self.config.trainer.eval_every, first_step, self.config.weight_sync.interval)
        async with asyncio.TaskGroup() as tasks:  # waits for the last step and evaluation; an error of theirs ends it
            if due and self.recorder.newest_evaluated < due:
                await self._begin_evaluation(first_step, tasks)
            for global_steps in range(first_step, self.config.trainer.total_steps):
                await self._step(global_steps, tasks)
                if self.has_ended_early:
                    if self._evaluating is not None:  # a run that goes on from the checkpoint begins another
                        self._evaluating.cancel()
                    return

    def end_early(self) -> None:
        """Save a checkpoint with the next weights that go live, and take no step after them."""
        self._is_to_end = True

    async def _step(self, global_steps: int, tasks: asyncio.TaskGroup) -> None:
        """Take one step: train on a batch, and publish the weights. `global_steps` were taken before it."""
        done = global_steps + 1
        parts = StepParts(done, self.emit)
        with timed(parts.timings, "step"):
            with parts.part(StepPart.wait):
                batch = await self._next_batch(global_steps)
            if self.manager is not None:
                self._tell_batch(done, batch.groups)
                self._batch_check.refuse(batch.groups, global_steps)
            early = None if self._early is None else self._early.take(batch.groups)
            assembled = await self._assembler.assemble(batch.groups, global_steps, parts.part, early=early)
            result, fleet = await asyncio.gather(
                self._train(assembled.batch, global_steps, parts), self._fleet_gauges()
            )  # outside the publishing lock, which a slow replica must not hold
            if self.manager is not None:  # one update can be under way
                with parts.part(StepPart.update):
                    await self._settled()
            actor, credit = to_floats(result.metrics), assembled.credit
            if actor["actor/skipped_steps"]:
                self._record_skipped(done, assembled.broken or not_finite(actor), batch.groups, credit.advantages)
            update = await self._publish(parts, tasks)
        seconds = parts.timings["timing_s/step"]
        step_batch = assembled.batch
        has_learned = step_batch is not None and actor["actor/skipped_steps"] < len(step_batch.optimizer_steps)
        num_trained = step_batch.num_trained if step_batch is not None and has_learned else 0
        metrics = {
            **self._rollout_metrics(batch, credit, global_steps, seconds),
            **actor,
            **parts.timings,
            **fleet,
            "perf/trained_tokens": float(num_trained),
            "perf/throughput/trained": num_trained / seconds,
            "perf/trainer_idle": 1 - actor["perf/trainer_busy_s"] / seconds,
        }
        step = TakenStep(done, batch.groups, credit.advantages, metrics, assembled.sampled(result), result.weights)
        self._settling = tasks.create_task(self._settle(step, update, tasks), name=f"settle-{done}")
        if self.manager is None:
            await self._settled()

    async def _next_batch(self, global_steps: int) -> TrainBatch:
        """Wait for the groups of the step. Those that are there already are scored meanwhile, if they need it."""
        if self._early is None:
            return await self.buffer.next_batch(global_steps)
        waiting = asyncio.ensure_future(self.buffer.next_batch(global_steps))
        try:
            while not (await asyncio.wait([waiting], timeout=LOOK_S))[0]:
                groups, mixed = self._early.batch(self.buffer.ready, global_steps)
                if groups:
                    self._early.add(groups, None if mixed is None else await self._score_old(mixed))
            return await waiting
        finally:
            waiting.cancel()

    def _rollout_metrics(
        self, batch: TrainBatch, credit: Credit, global_steps: int, seconds: float
    ) -> dict[str, float]:
        """Return the metrics of what was sampled; none in a supervised run."""
        if self.manager is None:
            return {}
        return {
            **group_metrics(batch.groups, credit.advantages, global_steps, self.config.weight_sync.interval),
            **credit.metrics,
            **{f"sources/{source}/trained_groups": float(number) for source, number in batch.trained.items()},
            "staleness/masked_tokens": float(batch.masked_tokens),
            "perf/groups_per_second": len(batch.groups) / seconds,
        }

    async def _fleet_gauges(self) -> dict[str, float]:
        return {} if self.fleet_gauges is None else await self.fleet_gauges()

    async def _publish(self, parts: StepParts, tasks: asyncio.TaskGroup) -> asyncio.Task[UpdateReport] | None:
        """Stage a checkpoint if one is due and publish the weights, every weight_sync.interval steps. Return the
        update, which goes on in the background once the weights have been read."""
        done = parts.done
        if done % self.config.weight_sync.interval:
            return None
        if self.manager is None:
            await self._stage_if_due(parts)
            return None
        is_last = done == self.config.trainer.total_steps
        if not is_last:
            await self._stage_if_due(parts)
        published = asyncio.Event()
        with parts.part(StepPart.update):
            update = tasks.create_task(self._update(self.manager, done, published), name=f"update-{done}")
            await published.wait()
        if is_last:  # no step is kept waiting, and workers that start again in the update would lose what is staged
            await update
            await self._stage_if_due(parts)
        return update

    async def _update(self, manager: WeightUpdater, done: int, published: asyncio.Event) -> UpdateReport:
        self.emit(UpdateStarted(global_steps=done))
        report = await manager.update_weights(done, published)
        names = tuple(update.name for update in report.replicas)
        self.emit(UpdateEnded(global_steps=done, replicas=names, failures=report.failures))
        return report

    async def _stage_if_due(self, parts: StepParts) -> None:
        """Copy the state after the step.

        The slots of what it was trained on are still held, so every prompt is in one place in the rollouts that are
        saved with it.
        """
        is_last = self._is_to_end and parts.done < self.config.trainer.total_steps  # read once: a signal sets it
        if is_last or self.checkpointer.is_due(parts.done):
            with parts.part(StepPart.checkpoint):
                await self.checkpointer.stage(parts.done, is_last=is_last)
            self.has_ended_early = is_last

    def _tell_batch(self, done: int, groups: Sequence[TrajectoryGroup]) -> None:
        ordinals = tuple(group.prompt.ordinal for group in groups)
        num_tokens = sum(group.num_tokens for group in groups)
        self.emit(BatchAssembled(global_steps=done, ordinals=ordinals, num_tokens=num_tokens))

    async def _settled(self) -> None:
        """Wait until the step before is settled."""
        if self._settling is not None:
            await self._settling

    async def _settle(
        self, step: TakenStep, update: asyncio.Task[UpdateReport] | None, tasks: asyncio.TaskGroup
    ) -> None:
        """Wait until the step's weights are live, then free the slots, record the step and start what it makes due."""
        metrics, verified = dict(step.metrics), {}
        if update is not None:
            report = await update
            metrics |= report.gauges()
            verified = {replica.name: replica.tag for replica in report.replicas}
            if self.replica_check is not None:  # beside the next step: a replica may have no seat for it at once
                tasks.create_task(self.replica_check.ask(step.done), name=f"check-{step.done}")
                metrics |= self.replica_check.gauges()
            await self.buffer.advance(step.done)
        metrics |= self.buffer.gauges() | self.workers.gauges() | self.checkpointer.gauges()
        metrics["timing_s/elapsed"] = time.perf_counter() - self._started
        if self.manager is not None:
            metrics["eval/skipped"] = float(self._skipped_evaluations)
            for group in step.groups:
                self.emit(GroupTrained(global_steps=step.done, ordinal=group.prompt.ordinal))
        evidence = Evidence(weights=step.weights, replicas=verified)
        self.recorder.record_step(step.done, metrics, step.groups, step.advantages, step.tokens, evidence)
        if self.checkpointer.is_due(step.done) or self.has_ended_early:
            self.checkpointer.commit({self.snapshot: self.recorder.state()})
        if is_first_update_after(self.config.trainer.eval_every, step.done, self.config.weight_sync.interval):
            await self._begin_evaluation(step.done, tasks)

    async def _score(self, batch: StepBatch) -> dict[str, FloatArray]:
        """Score a batch while nothing is published: an update that wants the weights waits here, not in its
        deadline."""
        assert self.manager is not None
        async with self.manager.publishing:
            return await self.workers.score(batch)

    async def _score_old(self, batch: MixedBatch) -> OldLogprobs:
        """Score stale tokens by older weights, which take the place of those that could be published."""
        assert self.manager is not None
        async with self.manager.publishing:
            return await self.workers.old_logprobs(batch)

    async def _train(self, step_batch: StepBatch | None, global_steps: int, parts: StepParts) -> StepResult:
        """Take the batch's optimizer steps on the workers, while nobody reads their weights."""
        async with nullcontext() if self.manager is None else self.manager.publishing:
            with parts.part(StepPart.train):
                result = await self.workers.train_step(step_batch, global_steps)
            if self.replica_check is not None:
                await self.replica_check.remember(global_steps + 1)
        return result

    def _record_skipped(
        self, done: int, reason: str, groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray]
    ) -> None:
        """Keep the batch of a step that NaN or infinity broke. Raise past trainer.max_skipped_steps."""
        count, sentence = self.recorder.record_skipped_step(done, reason, groups, advantages)
        allowed = self.config.trainer.max_skipped_steps
        if count > allowed:
            raise SkippedStepsError(f"{count} steps were skipped, trainer.max_skipped_steps={allowed}; {sentence}")

    async def _begin_evaluation(self, done: int, tasks: asyncio.TaskGroup) -> None:
        """Start the evaluation of version `done`; the caller evaluates the first and the last version.

        An evaluation that is due while another still runs is skipped and counted: if it started later, it would
        evaluate another version. In a supervised run it has ended when this returns.
        """
        if self.evaluate is None or self.has_ended_early or not 0 < done < self.config.trainer.total_steps:
            return
        if self.manager is None:
            await self._evaluate(self.evaluate)
        elif self._evaluating is None or self._evaluating.done():
            self.emit(EvaluationStarted(global_steps=done))
            self._evaluating = tasks.create_task(self._evaluate(self.evaluate), name="evaluation")
            await asyncio.sleep(0)  # it takes its replicas before the next update begins
        else:
            self._skipped_evaluations += 1

    async def _evaluate(self, evaluate: Evaluate) -> None:
        evaluation = await evaluate()
        self.recorder.record_evaluation(min(evaluation.versions), evaluation)


def not_finite(metrics: Mapping[str, float]) -> str:
    """Name the metrics of a step that are NaN or infinite."""
    names = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
    return f"not finite: {', '.join(names) or 'logprobs'}"
