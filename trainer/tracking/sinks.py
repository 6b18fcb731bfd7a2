"""Sinks: where metrics go. `Tracker` gives every record to a JSONL file that survives a crash, and to others.

A disk may be full or gone, wandb may fail: that costs records, which are counted, and never the run.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from configs.runtime.dotted import find
from configs.schema import SINK_PARAMETERS
from trainer.tracking.samples import StepSamples

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
PARTIAL = ".partial"
"""Suffix of a file that is being written."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Sink(Protocol):
    """A destination of metrics. Its calls raise OSError when it cannot take a record."""

    @property
    def name(self) -> str: ...

    def log(self, step: int, metrics: Mapping[str, float], samples: StepSamples | None = None) -> None:
        """Record `metrics` under `step`, the number of steps taken (`global_steps`), and of `samples` what
        it can show."""
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
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float], samples: StepSamples | None = None) -> None:
        """Append one line, of the metrics only. It is in the file when this returns.

        Raises:
            OSError: the line cannot be written. No part of it stays in the file, and the next call tries again.
        """
        line = _line({"step": step, "time": time.time(), **{key: float(value) for key, value in metrics.items()}})
        append_line(self._path, line)

    def close(self, exit_code: int) -> None:
        """Do nothing: every line is written already."""


class UserSink:
    """A sink of the user's own class, made as `Class(run_dir)`, with `log(step, metrics)` and `close(exit_code)`.

    Whatever it raises costs records, as with every sink, and never the run.
    """

    def __init__(self, path: str, run_dir: Path) -> None:
        """Make the class that `path`, "module:Class", names. Raises what the class raises."""
        self.name = path
        self._sink = find("tracking.sinks", path, SINK_PARAMETERS)(run_dir)

    def log(self, step: int, metrics: Mapping[str, float], samples: StepSamples | None = None) -> None:
        with self._as_os_error():
            self._sink.log(step, dict(metrics))

    def close(self, exit_code: int) -> None:
        with self._as_os_error():
            self._sink.close(exit_code)

    @contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


def cut_metrics(path: Path, global_steps: int, keep: Callable[[Path, bytes], None]) -> list[dict[str, Any]]:
    """Cut the records of steps after `global_steps` out of the file, atomically, after `keep(path, lines)` has taken
    them. Return the rest. Raises as `read_metrics` does."""
    if not path.exists():
        return []
    records = read_metrics(path)
    kept = [record for record in records if record["step"] <= global_steps]
    if len(kept) < len(records):
        keep(path, b"".join(_line(record) for record in records if record["step"] > global_steps))
    write_atomically(path, b"".join(map(_line, kept)))
    return kept


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `JsonlSink` in file order; a last line without its newline is torn and dropped.

    Raises:
        ValueError: a complete line is no JSON object; the message names file and line.
        OSError: the file cannot be read.
    """
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            records.append({key: _NON_FINITE.get(value, value) for key, value in dict(json.loads(line)).items()})
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: torn or damaged record: {error}") from error
    return records


def _line(record: Mapping[str, float]) -> bytes:
    finite = {key: value if math.isfinite(value) else json.dumps(value) for key, value in record.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Append to a file, and make it and its folder. Raises OSError, and then no part of the line stays in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(line) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class FailedWrites:
    """Counts failed writes by destination, and reports the first of each. Later writes may succeed again."""

    def __init__(self, report: Callable[[str], None] = logger.warning) -> None:
        self.counts: dict[str, int] = {}
        self._report = report

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @contextmanager
    def tolerated(self, destination: str) -> Iterator[None]:
        """Count an OSError of the block instead of raising it."""
        try:
            yield
        except OSError as error:
            if destination not in self.counts:
                self._report(f"{destination} cannot be written, the training goes on: {error}")
            self.counts[destination] = self.counts.get(destination, 0) + 1


class Tracker:
    """Gives every record to every sink, in order. A sink's OSErrors are counted; the first is reported.

    Example:
        tracker = Tracker([JsonlSink(run_dir / METRICS_FILE), WandbSink(...)])
        tracker.log(1, {"critic/rewards/mean": 0.41})
        tracker.close(exit_code=0)
    """

    def __init__(self, sinks: Sequence[Sink], failed: FailedWrites | None = None) -> None:
        self._sinks = tuple(sinks)
        self.failed = failed or FailedWrites()
        self.latest: dict[str, float] = {}
        """The latest value of every metric that was logged, evaluations included."""

    def log(self, step: int, metrics: Mapping[str, float], samples: StepSamples | None = None) -> None:
        """Record `metrics` and `samples` under `step`, the number of steps taken."""
        self.latest |= metrics
        for sink in self._sinks:
            with self.failed.tolerated(sink.name):
                sink.log(step, metrics, samples)

    def close(self, exit_code: int) -> None:
        for sink in self._sinks:
            with self.failed.tolerated(sink.name):
                sink.close(exit_code)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a temporary file next to `path` and rename it. Folders are made.

    A kill at any moment leaves the old file or the new one, and at most another whose name ends in `PARTIAL`.

    Raises:
        OSError: the file cannot be written. The old file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + PARTIAL)
    try:
        aside.write_bytes(data)
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
