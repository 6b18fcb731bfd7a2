"""The loop of supervised fine-tuning: demonstrations in, a checkpoint out. The workers are those of a training run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.schema import Config
from rollout.events.event import Emit, nobody
from rollout.types import TrajectoryGroup
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.metrics import to_floats
from trainer.step_parts import StepParts
from trainer.supervised.demonstrations import DemonstrationStream, supervised_batch, validation_batch
from trainer.supervised.recorder import SNAPSHOT, SupervisedRecorder
from trainer.tracking.bad_batches import SkippedStepsError, not_finite
from trainer.tracking.events.kinds import StepPart, StepSkipped
from trainer.worker.recovery import RecoveringWorkers


@dataclass(kw_only=True, eq=False)
class SupervisedLoop:
    """Takes the steps of a supervised run, each on trainer.prompts_per_step demonstrations. Nothing is sampled and
    nothing is published.

    Example:
        loop = SupervisedLoop(config=config, train=DemonstrationStream(groups, config.seed), validation=[], ...)
        async with checkpointer:
            await loop.run(first_step)
    """

    config: Config
    train: DemonstrationStream
    validation: Sequence[TrajectoryGroup]
    """Their loss is measured before the first step, every trainer.eval_every steps, and after the last."""
    workers: RecoveringWorkers
    recorder: SupervisedRecorder
    checkpointer: Checkpointer
    emit: Emit = nobody
    _started: float = field(default=0.0, init=False)

    async def run(self, first_step: int = 0) -> None:
        """Take the steps first_step .. total_steps - 1."""
        self._started = time.perf_counter()
        if not self.recorder.is_validated(first_step):
            await self._validate_if_due(first_step)
        for global_steps in range(first_step, self.config.trainer.total_steps):
            await self._step(global_steps)

    async def _step(self, global_steps: int) -> None:
        """Take one step, save and validate what is due. `global_steps` were taken before it."""
        done, size = global_steps + 1, self.config.trainer.prompts_per_step
        parts = StepParts(done, self.emit)
        with parts.whole():
            with parts.part(StepPart.assemble):
                groups = self.train.batch(global_steps, size)
                batch = supervised_batch(groups, self.config, global_steps)
            with parts.part(StepPart.train):
                result = await self.workers.train_step(batch, global_steps)
        actor, seconds = to_floats(result.metrics), parts.timings["timing_s/step"]
        if actor["actor/skipped_steps"]:
            self._record_skipped(done, not_finite(actor), groups)
        has_learned = actor["actor/skipped_steps"] < len(batch.optimizer_steps)
        trained = batch.num_trained if has_learned else 0
        metrics = {
            **actor,
            "sft/epoch": done * size / len(self.train),
            "perf/trained_tokens": float(trained),
            "perf/throughput/trained": trained / seconds,
            "perf/trainer_idle": 1 - actor["perf/trainer_busy_s"] / seconds,
            **self.workers.gauges(),
        }
        if self.checkpointer.is_due(done):
            with parts.part(StepPart.checkpoint):
                await self.checkpointer.stage(done)
        metrics |= parts.timings | self.checkpointer.gauges()
        metrics["timing_s/elapsed"] = time.perf_counter() - self._started
        self.recorder.record_step(done, metrics)
        if self.checkpointer.is_due(done):
            self.checkpointer.commit({SNAPSHOT: self.recorder.state()})
        await self._validate_if_due(done)

    def _record_skipped(self, done: int, reason: str, groups: Sequence[TrajectoryGroup]) -> None:
        """Raise past trainer.max_skipped_steps."""
        places = [group.prompt.extra["place"] for group in groups]
        count, sentence = self.recorder.record_skipped_step(done, reason, places)
        self.emit(StepSkipped(global_steps=done, reason=reason, file=""))
        allowed = self.config.trainer.max_skipped_steps
        if count > allowed:
            raise SkippedStepsError(f"{count} steps were skipped, trainer.max_skipped_steps={allowed}; {sentence}")

    async def _validate_if_due(self, done: int) -> None:
        trainer = self.config.trainer
        is_end = done in (0, trainer.total_steps)
        if not self.validation or not (is_end or (trainer.eval_every > 0 and done % trainer.eval_every == 0)):
            return
        batch = validation_batch(self.validation, self.config)
        logprobs = await self.workers.logprobs(batch)
        self.recorder.record_validation(done, float(-logprobs.mean(dtype="float64")), batch.num_tokens)
