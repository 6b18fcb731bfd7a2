"""The records of a supervised run, where they differ from those of a run that samples: no trajectories, and a loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.types import FloatArray, TrajectoryGroup
from trainer.supervised.demonstrations import Validation
from trainer.tokens import TrainedTokens
from trainer.tracking.events.kinds import StepSkipped
from trainer.tracking.proof import NO_EVIDENCE, PROOF_FILE, Evidence
from trainer.tracking.recorder import RunCounts, RunRecorder

VAL_LOSS = "eval/ce_loss"
SUPERVISED = "supervised"
"""The name of the recorder's state in a checkpoint. By it the checkpoint of a supervised run is told from any other."""


class OtherConversationsError(ValueError):
    """A checkpoint is of a run on other conversations."""


@dataclass(slots=True)
class SupervisedCounts(RunCounts):
    """Running totals of a supervised run."""

    taken: int | None = None
    """Conversations that the steps have taken. None: the checkpoint is from before they were counted."""
    tokens: float = 0.0
    """Trained tokens, each counted as often as it was trained."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(global_steps, loss) of every validation."""
    checksum: int | None = None
    """The checksum of the conversations (`DemonstrationStream.checksum`)."""


class SupervisedRecorder(RunRecorder):
    """Records the steps and validations of a supervised run: metrics.jsonl, summary.json, the console.

    Example:
        recorder = SupervisedRecorder(run_dir, tracker, console)
        recorder.begin(stream.checksum())
        recorder.record_step(1, metrics, groups, advantages)
        state = recorder.state()  # for a checkpoint of step 1
        recorder.write_summary({})
    """

    counts: SupervisedCounts  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.counts = SupervisedCounts()

    def begin(self, checksum: int) -> None:
        """Remember the conversations of the run. Raises OtherConversationsError if the restored run was on others."""
        if self.counts.checksum not in (None, checksum):
            raise OtherConversationsError("was trained on other conversations, or with another seed")
        self.counts.checksum = checksum

    def num_taken(self, size: int) -> int:
        """Return the conversations that the steps so far have taken, `size` being those of each step where it is not
        known."""
        if self.counts.taken is None:
            self.counts.taken = self.counts.steps * size
        return self.counts.taken

    def is_evaluated(self, global_steps: int) -> bool:
        return any(step == global_steps for step, _ in self.counts.losses)

    @property
    def newest_evaluated(self) -> int:
        return max((step for step, _ in self.counts.losses), default=-1)

    def record_step(
        self,
        global_steps: int,
        metrics: dict[str, float],
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
        tokens: TrainedTokens | None = None,
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        """Record the metrics of a step. The conversations themselves are in the user's files."""
        counts = self.counts
        counts.taken = self.num_taken(len(groups)) + len(groups)
        counts.steps = global_steps
        counts.tokens += metrics["perf/trained_tokens"]
        counts.elapsed = self._elapsed_before + metrics["timing_s/elapsed"]
        with self._failed.tolerated(PROOF_FILE):
            self.chain.add(global_steps, evidence)
        self._log_step(global_steps, metrics)

    def record_evaluation(self, global_steps: int, evaluation: Validation) -> None:
        """Record the mean loss of the held-out tokens under the weights tagged `global_steps`."""
        self.counts.losses.append((global_steps, evaluation.loss))
        self._tracker.log(global_steps, {VAL_LOSS: evaluation.loss, "eval/ce_tokens": float(evaluation.num_tokens)})
        text = f"loss {evaluation.loss:.4f} over {evaluation.num_tokens:,} tokens"
        self._console.message(f"validation after step {global_steps}: {text}")

    def record_skipped_step(
        self, global_steps: int, reason: str, groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray]
    ) -> tuple[int, str]:
        """Return the number of skipped steps of the run, and a sentence that names the conversations."""
        self.counts.skipped_steps += 1
        places = ", ".join(group.prompt.extra["place"] for group in groups)
        sentence = f"step {global_steps} was skipped, {reason}; its conversations are {places}"
        self._console.message(sentence)
        self._emit(StepSkipped(global_steps=global_steps, reason=reason, file=""))
        return self.counts.skipped_steps, sentence

    def _take_evaluation(self, record: dict[str, Any]) -> None:
        if VAL_LOSS in record and not self.is_evaluated(record["step"]):
            self.counts.losses.append((record["step"], record[VAL_LOSS]))

    def _totals(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "steps": counts.steps,
            "val_loss_before": counts.losses[0][1] if counts.losses else None,
            "val_loss_after": counts.losses[-1][1] if counts.losses else None,
            "trained_tokens": int(counts.tokens),
            "training_seconds": round(counts.elapsed, 3),
            "seconds": round(self._seconds, 3),
            "skipped_steps": counts.skipped_steps,
        }
