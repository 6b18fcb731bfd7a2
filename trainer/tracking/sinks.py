"""Where metrics go. `Tracker` fans out to sinks: a JSONL file that survives a crash, and wandb (wandb_sink.py).

A sink that fails costs its records, which are counted; the training goes on, and the sink may come back.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from trainer.tracking.files import FailedWrites, append_line, write_atomically

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """One destination of metrics. Its calls raise OSError when it cannot take them, which is not worth a run."""

    @property
    def name(self) -> str: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` under `step`, the number of optimizer steps taken (`global_steps`)."""
        ...

    def close(self, exit_code: int) -> None:
        """Finish; 0 says the run went well. A second call does nothing."""
        ...


class JsonlSink:
    """Appends one line per call: `{"step": 3, "time": 1767225600.0, "critic/rewards/mean": 0.41}`.

    `time` is in seconds since the epoch. JSON has no NaN, so non-finite values are written as the strings "NaN",
    "Infinity" and "-Infinity"; `read_metrics` turns them back into floats.
    """

    name = METRICS_FILE

    def __init__(self, path: Path) -> None:
        """The file and its folder are made with the first line."""
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, which is on disk when this returns.

        Raises:
            ValueError: a metric is called "step" or "time".
            OSError: the file cannot be written. The next call tries again.
        """
        for key in ("step", "time"):
            if key in metrics:
                raise ValueError(f"metric {key!r} would overwrite the record's own field; rename it")
        record = {"step": int(step), "time": time.time(), **{key: _encode(value) for key, value in metrics.items()}}
        append_line(self._path, json.dumps(record, allow_nan=False))

    def close(self, exit_code: int) -> None:
        """There is nothing to finish."""


def cut_metrics(path: Path, global_steps: int) -> list[dict[str, Any]]:
    """Leave the records of steps up to `global_steps`, in one step, and return them. Raises as `read_metrics` does."""
    if not path.exists():
        return []
    lines, records = path.read_bytes().split(b"\n")[:-1], read_metrics(path)
    kept = [(line, record) for line, record in zip(lines, records, strict=True) if record["step"] <= global_steps]
    write_atomically(path, b"".join(line + b"\n" for line, _ in kept))
    return [record for _, record in kept]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `JsonlSink` in file order; a last line without its newline is torn and dropped.

    Raises:
        ValueError: a complete line is no JSON object; the message names file and line.
        OSError: the file cannot be read.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_decode(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


class Tracker:
    """Gives every record to every sink, in order. What a sink cannot take is counted and said once."""

    def __init__(self, sinks: Sequence[Sink], failed: FailedWrites | None = None) -> None:
        """Take over `sinks`; closing the tracker closes them."""
        self._sinks = tuple(sinks)
        self.failed = failed or FailedWrites()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` under `step`, the number of optimizer steps taken."""
        for sink in self._sinks:
            with self.failed.tolerated(sink.name):
                sink.log(step, metrics)

    def close(self, exit_code: int) -> None:
        """Close all sinks, also when one of them raises; what is no OSError is raised at the end."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.enter_context(self.failed.tolerated(sink.name))
                stack.callback(sink.close, exit_code)


def _encode(value: float) -> float | str:
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(line: bytes, where: str) -> dict[str, Any]:
    try:
        record: object = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: torn or damaged record: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return {str(k): _NON_FINITE[v] if isinstance(v, str) and v in _NON_FINITE else v for k, v in record.items()}
