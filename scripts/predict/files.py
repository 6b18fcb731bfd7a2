"""What a run has left that tells how long things take: metrics, trajectories, events, config."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

from scripts.predict.profile import PredictError
from trainer.tracking.events.reader import still_valid
from trainer.tracking.events.view import RunView
from trainer.tracking.sinks import METRICS_FILE, read_metrics

MOST_ROWS = 50_000
"""Trajectories that are read, the latest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of trajectories/."""

    ordinal: int
    began: float
    """Seconds since the epoch."""
    generate_s: float
    reward_s: float
    turns: tuple[int, ...]
    """Tokens that the policy sampled, by turn."""
    prompt_tokens: int

    @property
    def sampled(self) -> int:
        return sum(self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    config: Mapping[str, Any]
    steps: tuple[Mapping[str, float], ...]
    """Metrics of the steps, ascending."""
    rows: tuple[Row, ...]
    view: RunView | None
    """Of its events; None where the folder has none of turns."""
    evaluation_requests: int
    """Held-out prompts times samples; 0 where nothing was evaluated."""


def read_run(run_dir: Path) -> RunFiles:
    """Raises PredictError where there is nothing to learn from."""
    if not (run_dir / METRICS_FILE).is_file():
        raise PredictError(f"run={run_dir}: has no {METRICS_FILE}; give the folder of a run, such as runs/latest")
    metrics, config = _metrics(run_dir), _config(run_dir)
    records = {int(record["step"]): record for record in metrics if "timing_s/step" in record}
    if not records:
        raise PredictError(f"run={run_dir}: no step is in its {METRICS_FILE} yet")
    return RunFiles(
        config=config,
        steps=tuple(records[step] for step in sorted(records)),
        rows=tuple(_rows(run_dir)),
        view=_view(run_dir),
        evaluation_requests=_evaluation_requests(metrics, config),
    )


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    try:
        return read_metrics(run_dir / METRICS_FILE)
    except ValueError as error:
        raise PredictError(f"run={run_dir}: {error}") from error


def _config(run_dir: Path) -> Mapping[str, Any]:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise PredictError(f"run={run_dir}: has no config.yaml")
    config: Any = OmegaConf.to_container(OmegaConf.load(path))
    return config


def _evaluation_requests(metrics: list[dict[str, Any]], config: Mapping[str, Any]) -> int:
    counts = [int(record["eval/num_prompts"]) for record in metrics if "eval/num_prompts" in record]
    return counts[-1] * int(config["evaluation"]["samples"]) if counts else 0


def _rows(run_dir: Path) -> list[Row]:
    """Those of the latest steps."""
    rows: list[Row] = []
    for path in sorted((run_dir / "trajectories").glob("step_*.jsonl"), reverse=True):
        rows = [*_rows_of(path), *rows]
        if len(rows) >= MOST_ROWS:
            break
    return rows


def _rows_of(path: Path) -> Iterator[Row]:
    for line in path.read_bytes().splitlines():
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError:  # a last line that a killed process has left
            continue
        sequences = row["sequences"]
        turns = tuple(end - start for sequence in sequences for start, end in sequence["turns"])
        if turns:
            yield Row(
                ordinal=row["ordinal"],
                began=row["began"],
                generate_s=row["generate_s"],
                reward_s=row["reward_s"],
                turns=turns,
                prompt_tokens=sequences[0]["prompt_tokens"],
            )


def _view(run_dir: Path) -> RunView | None:
    view = RunView()
    for stamped in still_valid(run_dir):
        view.add(stamped)
    has_turns = any(one.turns for group in view.groups.values() for one in group.trajectories.values())
    return view if has_turns else None
