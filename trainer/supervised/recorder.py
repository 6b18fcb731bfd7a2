"""The files of a supervised run: metrics.jsonl and summary.json."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.tracking.console import Console
from trainer.tracking.recorder import SUMMARY_FILE
from trainer.tracking.set_aside import SetAside
from trainer.tracking.sinks import METRICS_FILE, Tracker, cut_metrics, write_atomically

VAL_LOSS = "eval/ce_loss"
SNAPSHOT = "supervised"
"""Name of the recorder's state in a checkpoint."""


class OtherConversationsError(ValueError):
    """A checkpoint is of a run on other conversations."""


@dataclass(slots=True)
class SupervisedCounts:
    """Running totals of the run."""

    steps: int = 0
    tokens: float = 0.0
    """Trained, each as often as it was."""
    skipped_steps: int = 0
    elapsed: float = 0.0
    """Seconds from the beginning of the first step to the end of the last."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(global_steps, loss) of every validation."""
    checksum: int | None = None
    """Of the conversations (`DemonstrationStream.checksum`)."""


class SupervisedRecorder:
    """Records the steps and validations of a supervised run, in the tracker and on the console.

    Example:
        recorder = SupervisedRecorder(run_dir, tracker, console)
        recorder.record_step(1, metrics)
        state = recorder.state()  # for a checkpoint of step 1
        recorder.write_summary({})
    """

    def __init__(self, run_dir: Path, tracker: Tracker, console: Console):
        self._run_dir = run_dir
        self._tracker = tracker
        self._console = console
        self._failed = tracker.failed
        self._elapsed_before = 0.0
        self._started = time.perf_counter()
        self.counts = SupervisedCounts()

    def begin(self, checksum: int) -> None:
        """Raises OtherConversationsError if what was restored is of a run on others."""
        if self.counts.checksum not in (None, checksum):
            raise OtherConversationsError("was trained on other conversations, or with another seed")
        self.counts.checksum = checksum

    def state(self) -> bytes:
        """Return what `restore` needs, for a checkpoint of the steps recorded up to now."""
        return json.dumps(asdict(self.counts)).encode()

    def restore(self, state: bytes, global_steps: int, aside: SetAside) -> None:
        """Continue from the checkpoint of `global_steps`, and move the records of later steps away.

        Raises:
            ValueError: metrics.jsonl is damaged; the message names file and line.
            OSError: a file cannot be read or moved.
        """
        self.counts = SupervisedCounts(**json.loads(state))
        self._elapsed_before = self.counts.elapsed
        for record in cut_metrics(self._run_dir / METRICS_FILE, global_steps, aside.write):
            if VAL_LOSS in record and not self.is_validated(record["step"]):  # it came after the checkpoint's state
                self.counts.losses.append((record["step"], record[VAL_LOSS]))

    def is_validated(self, global_steps: int) -> bool:
        return any(step == global_steps for step, _ in self.counts.losses)

    def record_step(self, global_steps: int, metrics: dict[str, float]) -> None:
        """Record a step. `global_steps` counts it already."""
        counts = self.counts
        counts.steps = global_steps
        counts.tokens += metrics["perf/trained_tokens"]
        counts.elapsed = self._elapsed_before + metrics["timing_s/elapsed"]
        more = {
            "timing_s/elapsed": counts.elapsed,
            "actor/skipped_steps": float(counts.skipped_steps),
            "tracking/failed_writes": float(self._failed.total),
        }
        self._tracker.log(global_steps, metrics | more)
        self._console.step(global_steps, metrics | more)

    def record_validation(self, global_steps: int, loss: float, num_tokens: int) -> None:
        """Record the mean loss of the validation's tokens under the weights tagged `global_steps`."""
        self.counts.losses.append((global_steps, loss))
        self._tracker.log(global_steps, {VAL_LOSS: loss, "eval/ce_tokens": float(num_tokens)})
        self._console.message(f"validation after step {global_steps}: loss {loss:.4f} over {num_tokens:,} tokens")

    def record_skipped_step(self, global_steps: int, reason: str, places: list[str]) -> tuple[int, str]:
        """Return the number of skipped steps of the run, and a sentence that names the conversations."""
        self.counts.skipped_steps += 1
        sentence = f"step {global_steps} was skipped, {reason}; its conversations are {', '.join(places)}"
        self._console.message(sentence)
        return self.counts.skipped_steps, sentence

    def write_summary(self, more: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json. Return its content."""
        counts = self.counts
        summary = {
            "steps": counts.steps,
            "val_loss_before": counts.losses[0][1] if counts.losses else None,
            "val_loss_after": counts.losses[-1][1] if counts.losses else None,
            "trained_tokens": int(counts.tokens),
            "training_seconds": round(counts.elapsed, 3),
            "seconds": round(time.perf_counter() - self._started, 3),
            "skipped_steps": counts.skipped_steps,
            **more,
            "failed_writes": dict(self._failed.counts),
        }
        with self._failed.tolerated(SUMMARY_FILE):
            write_atomically(self._run_dir / SUMMARY_FILE, (json.dumps(summary, indent=2) + "\n").encode())
        return summary
