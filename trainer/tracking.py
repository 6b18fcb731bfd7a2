"""Where metrics go: a JSONL file that survives a crash, and wandb, which may fail without hurting training.

`Tracker` fans out to sinks. A file that cannot be written ends the run (the disk is full, checkpoints are next); wandb
that cannot be reached is warned about once and left alone.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

if TYPE_CHECKING:
    from wandb import Run

logger = logging.getLogger(__name__)

WANDB_MODES: Final = ("offline", "online", "disabled")
WANDB_FINISH_SECONDS = 120.0
"""How long closing may wait for uploads; what is not uploaded by then stays on disk for `wandb sync`."""

_Mode = Literal["offline", "online"]
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Sink(Protocol):
    """One destination of metrics."""

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

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, making its folder, after cutting the half line that a crash may have left."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_tail(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and flush it.

        Raises:
            ValueError: a metric is called "step" or "time", or the sink is closed.
            OSError: the file cannot be written.
        """
        for key in ("step", "time"):
            if key in metrics:
                raise ValueError(f"metric {key!r} would overwrite the record's own field; rename it")
        record = {"step": int(step), "time": time.time(), **{key: _encode(value) for key, value in metrics.items()}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self, exit_code: int) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `JsonlSink` in file order; a last line without its newline is torn and dropped.

    Raises:
        ValueError: a complete line is no JSON object; the message names file and line.
        OSError: the file cannot be read.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_decode(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


class WandbSink:
    """Logs to wandb, with its files under `run_dir/wandb`. A failing wandb is warned about once, then ignored.

    Steps are sent as the metric `global_steps` and used as the x axis: wandb silently drops what is logged under a
    step of its own that is lower than the latest, as happens after resuming from a checkpoint.
    """

    def __init__(self, run_dir: Path, mode: str, project: str, name: str | None, config: Mapping[str, Any]) -> None:
        """Start a wandb run, unless `mode` is "disabled", which does not even import wandb.

        `name` None lets wandb choose one; `config` is what the dashboard shows as the run's configuration.

        Raises:
            ValueError: `mode` is not one of "offline", "online", "disabled".
        """
        if mode not in WANDB_MODES:
            raise ValueError(f"wandb mode must be one of {', '.join(WANDB_MODES)}, got {mode!r}")
        self._run: Run | None = None
        if mode != "disabled":
            run_dir.mkdir(parents=True, exist_ok=True)
            self._attempt("starting", lambda: self._start(run_dir, mode, project, name, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send `metrics` under `global_steps = step`."""
        run = self._run
        if run is not None:
            self._attempt(f"logging step {step}", lambda: run.log({"global_steps": step, **metrics}))

    def close(self, exit_code: int) -> None:
        """Finish the run and end wandb's helper process, waiting at most `WANDB_FINISH_SECONDS` for uploads."""
        if self._run is not None:
            self._attempt("finishing", lambda: self._finish(exit_code))
            self._run = None

    def _start(self, run_dir: Path, mode: _Mode, project: str, name: str | None, config: Mapping[str, Any]) -> None:
        import wandb  # here, because it is slow and not needed when disabled

        settings = wandb.Settings(
            silent=True,
            console="off",  # wandb would otherwise wrap stdout under the live console
            finish_timeout=WANDB_FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        run = wandb.init(dir=run_dir, mode=mode, project=project, name=name, config=dict(config), settings=settings)
        run.define_metric("global_steps")
        run.define_metric("*", step_metric="global_steps")
        self._run = run

    def _finish(self, exit_code: int) -> None:
        import wandb

        if self._run is not None:
            self._run.finish(exit_code=exit_code)
        wandb.teardown(exit_code=exit_code)

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        """Run `action`; if it raises, say so once and stop using wandb."""
        try:
            action()
        # Everything, because wandb raises its own errors, OSError, ConnectionResetError or ImportError alike, and none
        # of them is worth a training run.
        except Exception as error:
            self._run = None
            logger.warning("wandb failed while %s, going on without it: %s: %s", what, type(error).__name__, error)


class Tracker:
    """Gives every record to every sink, in order."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        """Take over `sinks`; closing the tracker closes them."""
        self._sinks = tuple(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` under `step`, the number of optimizer steps taken."""
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self, exit_code: int) -> None:
        """Close all sinks, also when one of them raises; its error is raised at the end."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close, exit_code)


def _cut_torn_tail(path: Path) -> None:
    """Cut what follows the last newline, so that the next line starts on its own."""
    data = path.read_bytes() if path.exists() else b""
    complete = data.rfind(b"\n") + 1
    if complete < len(data):
        logger.warning("%s: cutting a torn last line of %d bytes", path, len(data) - complete)
        with path.open("r+b") as file:
            file.truncate(complete)


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
