"""What a run leaves behind: metrics, trajectories, summary. Observability must never change the training."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.types import FloatArray, TrajectoryGroup
from trainer.batch_metrics import is_spanning
from trainer.console import Console
from trainer.metrics import percentile
from trainer.tracking import Tracker


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


class RunRecorder:
    """Files under the run folder: metrics.jsonl (by the tracker), trajectories/step_NNNNNN.jsonl, summary.json."""

    def __init__(self, run_dir: Path, tracker: Tracker, console: Console):
        self._run_dir = run_dir
        self._tracker = tracker
        self._console = console
        self._started = time.perf_counter()
        self.counts = RunCounts()
        (run_dir / "trajectories").mkdir(parents=True, exist_ok=True)

    def record_step(
        self,
        global_steps: int,
        metrics: dict[str, float],
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
    ) -> None:
        """`global_steps`: optimizer steps taken, this one included."""
        counts = self.counts
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        counts.steps = global_steps
        counts.trajectories += len(trajectories)
        counts.spanning_trajectories += sum(is_spanning(trajectory) for trajectory in trajectories)
        counts.max_token_staleness = max(counts.max_token_staleness, metrics["staleness/max"])
        counts.training_seconds += metrics["timing_s/step"]
        if "weight_sync/pause_ms" in metrics:
            counts.pause_ms.append(metrics["weight_sync/pause_ms"])
        self._tracker.log(global_steps, metrics)
        self._console.step(global_steps, metrics)
        self._write_trajectories(global_steps, groups, advantages)

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None:
        self.counts.accuracies.append((global_steps, evaluation.accuracy))
        self._tracker.log(
            global_steps,
            {
                "eval/accuracy": evaluation.accuracy,
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

    def write_summary(self, more: dict[str, Any]) -> dict[str, Any]:
        """summary.json from the counts and what only the caller knows. Returns its content."""
        counts = self.counts
        summary = {
            "accuracy_before": counts.accuracies[0][1],
            "accuracy_after": counts.accuracies[-1][1],
            "steps": counts.steps,
            "seconds": round(time.perf_counter() - self._started, 3),
            "training_seconds": round(counts.training_seconds, 3),
            "trajectories": counts.trajectories,
            "spanning_trajectories": counts.spanning_trajectories,
            "max_token_staleness": int(counts.max_token_staleness),
            "samples_per_second": round(counts.trajectories / counts.training_seconds, 2),
            "pause_ms_p50": round(percentile(counts.pause_ms, 50), 3),
            "pause_ms_p99": round(percentile(counts.pause_ms, 99), 3),
            **more,
        }
        (self._run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary

    def _write_trajectories(
        self, global_steps: int, groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray]
    ) -> None:
        path = self._run_dir / "trajectories" / f"step_{global_steps:06d}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for group, group_advantages in zip(groups, advantages, strict=True):
                for index, (trajectory, advantage) in enumerate(zip(group.trajectories, group_advantages, strict=True)):
                    record = {
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
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
