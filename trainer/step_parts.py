"""The parts of a step: told as events, and timed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollout.events.event import Emit
from trainer.metrics import timed
from trainer.tracking.events.kinds import StepPart, StepPartEnded, StepPartStarted

METRICS = {StepPart.wait: "wait_batch", StepPart.train: "train_step", StepPart.update: "update_weights"}
"""`timing_s/<name>` of a part. Others have the part's own name."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of one step.

    Example:
        parts = StepParts(7, emit)
        with parts.whole():
            with parts.part(StepPart.wait):
                batch = await buffer.next_batch(6)
        parts.timings   # {"timing_s/wait_batch": 0.21, "timing_s/step": 0.34}
    """

    done: int
    """Steps taken, this one included."""
    emit: Emit
    timings: dict[str, float] = field(default_factory=dict)
    """`timing_s/<name>` -> seconds so far, summed where a part comes twice."""

    @contextmanager
    def part(self, part: StepPart) -> Iterator[None]:
        """The block is this part of the step."""
        self.emit(StepPartStarted(global_steps=self.done, part=part))
        with timed(self.timings, METRICS.get(part, part.value)):
            yield
        self.emit(StepPartEnded(global_steps=self.done, part=part))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The block is the step."""
        with timed(self.timings, "step"):
            yield
