"""The files of a run: metrics, records, bad batches, summary. A file that cannot be written never ends the run."""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollout.events.event import Emit, nobody
from rollout.events.kinds import GroupDiscarded
from rollout.types import DiscardedGroup, FloatArray, TrajectoryGroup
from trainer.tokens import TrainedTokens
from trainer.tracking.console import Console
from trainer.tracking.coverage import Coverage
from trainer.tracking.events.kinds import EvaluationEnded, Resumed, StepRecorded, StepSkipped
from trainer.tracking.proof import (
    CERTIFICATE_FILE,
    NO_EVIDENCE,
    PROOF_FILE,
    Evidence,
    Origin,
    ProofChain,
    sha256,
    trajectory_proofs,
)
from trainer.tracking.samples import Sampler
from trainer.tracking.set_aside import SetAside
from trainer.tracking.sinks import METRICS_FILE, Tracker, append_line, cut_metrics, write_atomically
from trainer.tracking.step_metrics import is_spanning
from trainer.tracking.trajectories import (
    DISCARDED,
    EVALUATIONS,
    TRAJECTORIES,
    discard_record,
    sample_records,
    step_files,
    to_lines,
    token_arrays,
    trajectory_records,
)

RECORDER = "recorder"
"""The name of the recorder's state in a checkpoint."""
BAD_BATCHES = "bad_batches"
SUMMARY_FILE = "summary.json"
ACCURACY = "eval/accuracy"
FLAT_STEPS = 10
"""The number of the latest steps whose mean share counts: one step alone says little."""
TOO_MANY_FLAT = 0.5
"""The share of groups without a gradient beyond which it is said."""
STEP_FOLDERS = (TRAJECTORIES, BAD_BATCHES, EVALUATIONS, DISCARDED)
"""Folders of the run folder with files step_NNNNNN.*."""


class OtherWeightsError(RuntimeError):
    """A checkpoint gives other weights than those that were saved. The message names it and both digests."""


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
    """The seconds from the beginning of the first step to the end of the last."""
    seconds: float = 0.0
    """The seconds of the whole run before this process started."""
    recorded_since: int = 0
    """The step after which the records of this folder begin: those before it are in the folder it continues."""


class RunRecorder:
    """Records steps and evaluations: to the tracker, to the console, and to files in the run folder.

    The files are those that `trainer.tracking.trajectories` describes, bad_batches/step_NNNNNN.npz and summary.json;
    the tracker writes metrics.jsonl.

    Example:
        recorder = RunRecorder(run_dir, tracker, console)
        recorder.record_evaluation(0, evaluation)
        recorder.record_step(1, metrics, groups, advantages)
        state = recorder.state()  # for a checkpoint of step 1
        recorder.write_summary({"restarted": 0})
    """

    def __init__(
        self,
        run_dir: Path,
        tracker: Tracker,
        console: Console,
        *,
        record_tokens: bool = False,
        sampler: Sampler | None = None,
        coverage: Coverage | None = None,
        emit: Emit = nobody,
        num_dropped: Callable[[], int] = lambda: 0,
    ):
        """Record into a run folder.

        Args:
            sampler: chooses what sinks show of a step's trajectories; None if none of them shows any.
            coverage: compares what is trained with what was claimed; None if nothing does.
            emit: takes the events that name these files.
            num_dropped: returns how many events were not kept.
        """
        self._emit, self._num_dropped = emit, num_dropped
        self._run_dir = run_dir
        self._record_tokens = record_tokens
        self._sampler = sampler
        self._coverage = coverage
        self._tracker = tracker
        self._console = console
        self._flat_groups = FlatGroups(console.message)
        self._failed = tracker.failed
        self._started = time.perf_counter()
        self._elapsed_before = 0.0
        self._aside: SetAside | None = None
        self.counts = RunCounts()
        self.chain = ProofChain(run_dir)

    @property
    def latest_metrics(self) -> dict[str, float]:
        """The latest value of every metric that was recorded."""
        return self._tracker.latest

    def state(self) -> bytes:
        """Return the state for `restore`, for a checkpoint of the steps recorded up to now."""
        proof = {"link": self.chain.link, "weights": self.chain.weights}
        return json.dumps(asdict(self.counts) | proof | {"seconds": self._seconds}).encode()

    def restore(self, state: bytes, global_steps: int, aside: SetAside) -> None:
        """Continue from the checkpoint of `global_steps`: take its counts and clocks, move records of later steps away.

        It can be called again after a kill at any moment.

        Raises:
            ValueError: metrics.jsonl is damaged; the message names file and line.
            OSError: a file cannot be read or moved.
        """
        self._aside = aside
        counts = json.loads(state)
        link, weights = counts.pop("link", ""), counts.pop("weights", "")
        self.counts = type(self.counts)(**counts)
        self.chain.restore(link, weights, global_steps, aside.write)
        self._elapsed_before = self.counts.elapsed
        if not (self._run_dir / METRICS_FILE).exists():
            self.counts.recorded_since = max(0, global_steps)
        for record in cut_metrics(self._run_dir / METRICS_FILE, global_steps, aside.write):
            self._take_evaluation(record)
        for name in STEP_FOLDERS:  # what was discarded after the checkpoint's step is drawn again, too
            for step, path in step_files(self._run_dir / name):
                if step > global_steps:
                    aside.move(path)
        self._emit(Resumed(global_steps=global_steps))

    def _take_evaluation(self, record: dict[str, Any]) -> None:
        """Count the evaluation of a record, if it is one that ended after the checkpoint was saved."""
        if ACCURACY in record and not self.is_evaluated(record["step"]):
            self.counts.accuracies.append((record["step"], record[ACCURACY]))

    def is_evaluated(self, global_steps: int) -> bool:
        """Return whether an evaluation of that version has been recorded, by this process or an earlier one."""
        return any(step == global_steps for step, _ in self.counts.accuracies)

    @property
    def newest_evaluated(self) -> int:
        """The newest version whose evaluation has been recorded, or -1."""
        return max((step for step, _ in self.counts.accuracies), default=-1)

    @property
    def _seconds(self) -> float:
        return self.counts.seconds + time.perf_counter() - self._started

    def record_step(
        self,
        global_steps: int,
        metrics: dict[str, float],
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
        tokens: TrainedTokens | None = None,
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        """Record a step. `global_steps` counts it already: the first step is 1. `tokens`: what the training made of
        them, where that is known."""
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
        self._write_trajectories(global_steps, groups, advantages, tokens, evidence)
        if self._coverage is not None:
            self._coverage.take_trained(groups)
            metrics = metrics | self._coverage.metrics()
        samples = None if self._sampler is None else self._sampler.take(global_steps, groups, advantages)
        self._log_step(global_steps, metrics, samples)
        self._flat_groups.watch(global_steps, metrics)
        self._emit(StepRecorded(global_steps=global_steps, file=f"{TRAJECTORIES}/step_{global_steps:06d}.jsonl"))

    def _log_step(self, global_steps: int, metrics: dict[str, float], samples: Any = None) -> None:
        """Send the metrics of a step to the tracker and the console, with those that only the recorder knows."""
        metrics = metrics | {
            "timing_s/elapsed": self.counts.elapsed,
            "actor/skipped_steps": float(self.counts.skipped_steps),
            "tracking/failed_writes": float(self._failed.total),
            "tracking/dropped_events": float(self._num_dropped()),
        }
        self._tracker.log(global_steps, metrics, samples)
        self._console.step(global_steps, metrics)

    def _write_trajectories(
        self,
        global_steps: int,
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
        tokens: TrainedTokens | None,
        evidence: Evidence,
    ) -> None:
        records = [
            record
            for group, group_advantages in zip(groups, advantages, strict=True)
            for record in trajectory_records(group.prompt, group.trajectories, list(group_advantages))
        ]
        path = self._run_dir / TRAJECTORIES / f"step_{global_steps:06d}.jsonl"
        arrays = token_arrays(groups, advantages, tokens) if self._record_tokens else b""
        lines = to_lines(records)
        with self._failed.tolerated(TRAJECTORIES):
            if arrays:
                write_atomically(path.with_suffix(".npz"), arrays)
            write_atomically(path, lines)
        proofs = trajectory_proofs(groups, advantages, tokens)
        with self._failed.tolerated(PROOF_FILE):
            self.chain.add(
                global_steps, evidence, proofs, records=sha256(lines), tokens=sha256(arrays) if arrays else ""
            )

    def record_discarded(self, group: DiscardedGroup) -> None:
        """Record a group that will not be trained, under the step that comes next."""
        path = self._run_dir / DISCARDED / f"step_{self.counts.steps + 1:06d}.jsonl"
        with self._failed.tolerated(DISCARDED):
            append_line(path, to_lines([discard_record(group, self.counts.steps)]))
        if self._coverage is not None:
            self._coverage.take_discarded(group)
        discarded = GroupDiscarded(
            ordinal=group.prompt.ordinal,
            reason=group.reason.value,
            file=str(path.relative_to(self._run_dir)),
            global_steps=self.counts.steps + 1,
        )
        self._emit(discarded)

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None:
        """Record an evaluation of the weights tagged `global_steps`."""
        self.counts.accuracies.append((global_steps, evaluation.accuracy))
        with self._failed.tolerated(EVALUATIONS):
            path = self._run_dir / EVALUATIONS / f"step_{global_steps:06d}.jsonl"
            if self._aside is not None:  # of a run that is over, and evaluates its last version again
                self._aside.move(path)
            write_atomically(path, to_lines(sample_records(evaluation.prompts)))
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
                **{f"eval/agent/{name}": mean for name, mean in evaluation.agent_metrics.items()},
            },
        )
        self._console.evaluation(global_steps, evaluation.accuracy)
        ended = EvaluationEnded(
            global_steps=global_steps,
            accuracy=evaluation.accuracy,
            pinned=evaluation.pinned,
            file=f"{EVALUATIONS}/step_{global_steps:06d}.jsonl",
        )
        self._emit(ended)

    def record_skipped_step(
        self,
        global_steps: int,
        reason: str,
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
    ) -> tuple[int, str]:
        """Keep the batch of a skipped step in bad_batches/step_NNNNNN.npz (see `token_arrays`).

        Returns:
            The number of skipped steps of the run, and a sentence that names step, reason, file and prompts.
        """
        self.counts.skipped_steps += 1
        path = self._run_dir / BAD_BATCHES / f"step_{global_steps:06d}.npz"
        with self._failed.tolerated(BAD_BATCHES):
            write_atomically(path, token_arrays(groups, advantages))
        ordinals = ", ".join(str(group.prompt.ordinal) for group in groups)
        sentence = f"step {global_steps} was skipped, {reason}; its batch is {path}, prompts {ordinals}"
        self._console.message(sentence)
        self._emit(StepSkipped(global_steps=global_steps, reason=reason, file=str(path.relative_to(self._run_dir))))
        return self.counts.skipped_steps, sentence

    def record_beginning(self, global_steps: int, origin: Origin) -> None:
        """Record that the process begins to train, after `restore` if it resumes.

        Raises:
            OtherWeightsError: a checkpoint was loaded, and its weights are not those that were saved.
        """
        expected = self.chain.weights
        if expected not in ("", origin.weights):
            raise OtherWeightsError(
                f"{origin.continues}: its weights have the digest {origin.weights}, and had {expected} after step "
                f"{global_steps}, when they were saved"
            )
        with self._failed.tolerated(PROOF_FILE):
            self.chain.begin(global_steps, origin)

    def certified(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `run()` returns, the summary, and leave a certificate of how far it came, also if it raises."""
        summary = None
        try:
            summary = run()
            return summary
        finally:
            with self._failed.tolerated(CERTIFICATE_FILE):
                self.chain.write_certificate(summary)

    def write_summary(self, more: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json from the counts and the caller's entries. Return its content."""
        summary = {
            **self._totals(),
            **more,
            "failed_writes": dict(self._failed.counts),
            "dropped_events": self._num_dropped(),
        }
        self.replace_summary(summary)
        return summary

    def _totals(self) -> dict[str, Any]:
        """Return the entries of summary.json that come from the counts."""
        counts = self.counts
        return {
            "accuracy_before": counts.accuracies[0][1] if counts.accuracies else None,
            "accuracy_after": counts.accuracies[-1][1] if counts.accuracies else None,
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
            "recorded_since": counts.recorded_since,
        }

    def replace_summary(self, summary: dict[str, Any]) -> None:
        """Write another content of summary.json."""
        with self._failed.tolerated(SUMMARY_FILE):
            write_atomically(self._run_dir / SUMMARY_FILE, (json.dumps(summary, indent=2) + "\n").encode())


class FlatGroups:
    """Says once when most groups teach nothing: their advantages are all 0, because all their rewards are equal.

    Such a group is sampled and counted as any other, but has no gradient.

    Example:
        flat_groups = FlatGroups(console.message)
        flat_groups.watch(7, metrics)
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._latest: deque[tuple[float, float, float]] = deque(maxlen=FLAT_STEPS)
        self._has_warned = False

    def watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        if self._has_warned or "rollout/zero_variance_groups" not in metrics:
            return
        solved = metrics["rollout/solve_all"], metrics["rollout/solve_none"]
        self._latest.append((metrics["rollout/zero_variance_groups"], *solved))
        flat, solved, unsolved = (sum(column) / FLAT_STEPS for column in zip(*self._latest, strict=True))
        if len(self._latest) == FLAT_STEPS and flat > TOO_MANY_FLAT:
            self._has_warned = True
            self._report(
                f"steps {step - FLAT_STEPS + 1} to {step}: {flat:.0%} of the groups had equal rewards and no gradient "
                f"({solved:.0%} were solved by every trajectory, {unsolved:.0%} by none). "
                "algorithm.filter_groups=true samples other prompts in their place; harder or easier prompts "
                "(data.train_files) or a larger algorithm.group_size make them rarer"
            )
