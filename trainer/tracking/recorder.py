"""The files of a run: metrics, trajectories, bad batches, summary. A file that cannot be written never ends the run."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollout.types import FloatArray, TrajectoryGroup
from trainer.tracking.bad_batches import bad_batch
from trainer.tracking.console import Console
from trainer.tracking.sinks import METRICS_FILE, Tracker, cut_metrics, write_atomically
from trainer.tracking.step_metrics import is_spanning

TRAJECTORIES = "trajectories"
BAD_BATCHES = "bad_batches"
ACCURACY = "eval/accuracy"


@dataclass(slots=True)
class RunCounts:
    """Running totals of the run, for summary.json."""

    steps: int = 0
    trajectories: int = 0
    spanning_trajectories: int = 0
    max_token_staleness: float = 0.0
    pause_ms: list[float] = field(default_factory=list)
    training_seconds: float = 0.0
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    skipped_steps: int = 0
    elapsed: float = 0.0
    """Seconds from the beginning of the first step to the end of the last."""
    seconds: float = 0.0
    """Seconds of the whole run before this process started."""


class RunRecorder:
    """Records steps and evaluations: to the tracker, to the console, and to files in the run folder.

    The files are trajectories/step_NNNNNN.jsonl, bad_batches/step_NNNNNN.npz and summary.json; the tracker writes
    metrics.jsonl.

    Example:
        recorder = RunRecorder(run_dir, tracker, console)
        recorder.record_evaluation(0, evaluation)
        recorder.record_step(1, metrics, groups, advantages)
        state = recorder.state()  # for a checkpoint of step 1
        recorder.write_summary({"restarted": 0})
    """

    def __init__(self, run_dir: Path, tracker: Tracker, console: Console):
        self._run_dir = run_dir
        self._tracker = tracker
        self._console = console
        self._failed = tracker.failed
        self._started = time.perf_counter()
        self._elapsed_before = 0.0
        self.counts = RunCounts()

    def state(self) -> bytes:
        """Return what `restore` needs, for a checkpoint of the steps recorded up to now."""
        return json.dumps(asdict(self.counts) | {"seconds": self._seconds}).encode()

    def restore(self, state: bytes, global_steps: int) -> None:
        """Continue from the checkpoint of `global_steps`: take its counts and clocks, remove records of later steps.

        It can be called again after a kill at any moment.

        Raises:
            ValueError: metrics.jsonl is damaged; the message names file and line.
            OSError: a file cannot be read or removed.
        """
        self.counts = RunCounts(**json.loads(state))
        self._elapsed_before = self.counts.elapsed
        for record in cut_metrics(self._run_dir / METRICS_FILE, global_steps):
            if ACCURACY in record and not self.is_evaluated(record["step"]):  # it ended after the checkpoint was saved
                self.counts.accuracies.append((record["step"], record[ACCURACY]))
        for folder in (self._run_dir / TRAJECTORIES, self._run_dir / BAD_BATCHES):
            for path in folder.glob("step_*"):
                if int(path.name[5:].partition(".")[0]) > global_steps:
                    path.unlink()

    def is_evaluated(self, global_steps: int) -> bool:
        """Whether an evaluation of that version has been recorded, by this process or an earlier one."""
        return any(step == global_steps for step, _ in self.counts.accuracies)

    @property
    def _seconds(self) -> float:
        return self.counts.seconds + time.perf_counter() - self._started

    def record_step(
        self,
        global_steps: int,
        metrics: dict[str, float],
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
    ) -> None:
        """Record an optimizer step. `global_steps` counts it already: the first step is 1."""
        counts = self.counts
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        counts.steps = global_steps
        counts.elapsed = self._elapsed_before + metrics["timing_s/elapsed"]
        counts.trajectories += len(trajectories)
        counts.spanning_trajectories += sum(is_spanning(trajectory) for trajectory in trajectories)
        counts.max_token_staleness = max(counts.max_token_staleness, metrics["staleness/max"])
        counts.training_seconds += metrics["timing_s/step"]
        if "weight_sync/pause_ms" in metrics:
            counts.pause_ms.append(metrics["weight_sync/pause_ms"])
        with self._failed.tolerated(TRAJECTORIES):
            path = self._run_dir / TRAJECTORIES / f"step_{global_steps:06d}.jsonl"
            write_atomically(path, _trajectory_lines(groups, advantages).encode())
        more = {
            "timing_s/elapsed": counts.elapsed,
            "actor/skipped_steps": float(counts.skipped_steps),
            "tracking/failed_writes": float(self._failed.total),
        }
        self._tracker.log(global_steps, metrics | more)
        self._console.step(global_steps, metrics | more)

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None:
        """Record an evaluation of the weights tagged `global_steps`."""
        self.counts.accuracies.append((global_steps, evaluation.accuracy))
        self._tracker.log(
            global_steps,
            {
                ACCURACY: evaluation.accuracy,
                "eval/response_length": evaluation.mean_response_tokens,
                "eval/num_prompts": evaluation.num_prompts,
                "eval/pinned": float(evaluation.pinned),
                "eval/num_versions": len(evaluation.versions),
                "eval/min_version": min(evaluation.versions),
                "eval/max_version": max(evaluation.versions),
                **evaluation.metrics,
            },
        )
        self._console.evaluation(global_steps, evaluation.accuracy)

    def record_skipped_step(
        self,
        global_steps: int,
        reason: str,
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
    ) -> tuple[int, str]:
        """Keep the batch of a skipped step in bad_batches/step_NNNNNN.npz (see `bad_batch`).

        Returns:
            The number of skipped steps of the run, and a sentence that names step, reason, file and prompts.
        """
        self.counts.skipped_steps += 1
        path = self._run_dir / BAD_BATCHES / f"step_{global_steps:06d}.npz"
        with self._failed.tolerated(BAD_BATCHES):
            write_atomically(path, bad_batch(groups, advantages))
        ordinals = ", ".join(str(group.prompt.ordinal) for group in groups)
        sentence = f"step {global_steps} was skipped, {reason}; its batch is {path}, prompts {ordinals}"
        self._console.message(sentence)
        return self.counts.skipped_steps, sentence

    def write_summary(self, more: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json from the counts and the caller's entries. Return its content."""
        counts = self.counts
        summary = {
            "accuracy_before": counts.accuracies[0][1],
            "accuracy_after": counts.accuracies[-1][1],
            "steps": counts.steps,
            "seconds": round(self._seconds, 3),
            "training_seconds": round(counts.training_seconds, 3),
            "trajectories": counts.trajectories,
            "spanning_trajectories": counts.spanning_trajectories,
            "max_token_staleness": int(counts.max_token_staleness),
            "samples_per_second": round(counts.trajectories / counts.training_seconds, 2),
            "pause_ms_p50": round(float(np.percentile(counts.pause_ms, 50)), 3),
            "pause_ms_p99": round(float(np.percentile(counts.pause_ms, 99)), 3),
            "skipped_steps": counts.skipped_steps,
            **more,
            "failed_writes": dict(self._failed.counts),
        }
        with self._failed.tolerated("summary.json"):
            write_atomically(self._run_dir / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        return summary


def _trajectory_lines(groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray]) -> str:
    records = [
        {
            "ordinal": group.prompt.ordinal,
            "index": index,
            "prompt": group.prompt.text,
            "response": trajectory.text,
            "ground_truth": group.prompt.ground_truth,
            "reward": trajectory.reward,
            "overlong_penalty": trajectory.overlong_penalty,
            "error": trajectory.error,
            "advantage": round(float(advantage), 6),
            "versions": [[span.start, span.end, span.global_steps] for span in trajectory.spans],
            "finish_reason": trajectory.finish_reason,
            "replica": trajectory.replica,
        }
        for group, of_group in zip(groups, advantages, strict=True)
        for index, (trajectory, advantage) in enumerate(zip(group.trajectories, of_group, strict=True))
    ]
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
