"""The loop of supervised fine-tuning: demonstrations in, a checkpoint out. The workers are those of a training run."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from configs.schema import Config
from rollout.events.kinds import Emit, StepPart, StepPartEnded, StepPartStarted, StepSkipped, nobody
from rollout.types import TrajectoryGroup
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.metrics import timed, to_floats
from trainer.supervised.demonstrations import DemonstrationStream, supervised_batch, validation_batch
from trainer.supervised.recorder import SNAPSHOT, SupervisedRecorder
from trainer.tracking.bad_batches import SkippedStepsError, not_finite
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
        timings: dict[str, float] = {}
        with timed(timings, "step"):
            with self._part(done, StepPart.assemble, timings):
                groups = self.train.batch(global_steps, size)
                batch = supervised_batch(groups, self.config, global_steps)
            with self._part(done, StepPart.train, timings, "train_step"):
                result = await self.workers.train_step(batch, global_steps)
        actor, seconds = to_floats(result.metrics), timings["timing_s/step"]
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
            with self._part(done, StepPart.checkpoint, timings):
                await self.checkpointer.stage(done)
        metrics |= timings | self.checkpointer.gauges() | {"timing_s/elapsed": time.perf_counter() - self._started}
        self.recorder.record_step(done, metrics)
        if self.checkpointer.is_due(done):
            self.checkpointer.commit({SNAPSHOT: self.recorder.state()})
        await self._validate_if_due(done)

    @contextmanager
    def _part(self, done: int, part: StepPart, timings: dict[str, float], key: str | None = None) -> Iterator[None]:
        """Tell that the block is this part of the step, and add its seconds to `timing_s/<key>`, by default the part's
        name."""
        self.emit(StepPartStarted(global_steps=done, part=part))
        with timed(timings, key or part.value):
            yield
        self.emit(StepPartEnded(global_steps=done, part=part))

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
