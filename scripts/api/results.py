"""The results of the commands in Python."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from configs.checkpoint import CHECKPOINTS
from scripts.api.process import CommandProcess
from trainer.checkpoint.store import CheckpointStore
from trainer.tracking.recorder import ACCURACY, SUMMARY_FILE
from trainer.tracking.sinks import METRICS_FILE, read_metrics


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of `train` and `sft`.

    Example:
        result = train(recipe="arithmetic")
        result.summary["accuracy_after"], result.best_checkpoint
    """

    run_dir: Path
    summary: Mapping[str, Any]
    """The content of summary.json; empty after dry_run=True."""

    @property
    def accuracy(self) -> float | None:
        """The held-out accuracy of the last evaluation, or None where nothing is held out."""
        return self.summary.get("accuracy_after")

    @cached_property
    def metrics(self) -> tuple[Mapping[str, float], ...]:
        """The lines of metrics.jsonl, each with its `step`: one for each step and each evaluation (docs/metrics.md)."""
        file = self.run_dir / METRICS_FILE
        return tuple(read_metrics(file)) if file.is_file() else ()

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        """The checkpoints that the run has kept, oldest first."""
        return tuple(reversed(CheckpointStore(self.run_dir / CHECKPOINTS).saved()))

    @property
    def last_checkpoint(self) -> Path | None:
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def best_checkpoint(self) -> Path | None:
        """The kept checkpoint with the best held-out accuracy, the later of equal ones, or None where none of them was
        evaluated."""
        accuracies = {int(line["step"]): line[ACCURACY] for line in self.metrics if ACCURACY in line}
        evaluated = [path for path in self.checkpoints if _step(path) in accuracies]
        return max(evaluated, key=lambda path: (accuracies[_step(path)], _step(path)), default=None)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the content of summary.json; nothing where the command has only planned."""
    try:
        return json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


class UnprovenError(RuntimeError):
    """The run trained to its end, and the audit found something in its records."""

    def __init__(self, text: str, result: TrainResult):
        super().__init__(text)
        self.result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The result of `evaluate`."""

    run_dir: Path
    accuracy: float | None
    """The mean over all samples of all prompts; None after dry_run=True."""
    report: Mapping[str, Any]
    """The content of evaluation.json; empty after dry_run=True."""

    @property
    def scores(self) -> Mapping[str, Mapping[str, float]]:
        """The scores by data source, such as `scores["gsm8k"]["avg@4"]`."""
        return self.report.get("scores", {})


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that runs until it is closed, or until this process ends.

    Example:
        with serve("runs/latest") as server:
            client = openai.OpenAI(base_url=server.openai_url, api_key="any")
    """

    url: str
    """The address of the gateway."""
    run_dir: Path
    _process: CommandProcess = field(repr=False)

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    def close(self) -> None:
        """Stop the server, as Ctrl-C stops the command."""
        self._process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
