"""Log to wandb. It may raise, hang or be unreachable, so all its calls run in a thread of their own."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, fields
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.schema import WandbConfig, WandbMode
from trainer.tracking.machine import describe_machine
from trainer.tracking.samples import TRAJECTORIES_TABLE, Histogram, StepSamples, TrajectoryRow
from trainer.tracking.sinks import write_atomically
from trainer.tracking.wandb.views import ELAPSED, STEPS
from trainer.tracking.wandb.workspace import ensure_workspace

if TYPE_CHECKING:
    import wandb
    from wandb import Run

logger = logging.getLogger(__name__)

STATE_FILE = Path("wandb", "slipstream.json")
"""The file in the run folder with the id and group of the wandb run, what it has, and which run it continues."""
EVALUATED = {"eval/accuracy", "eval/ce_loss"}
"""Metrics of which each evaluation has one, and no step any."""
START_SECONDS = 30.0
"""The deadline of wandb.init, which waits for the server when online. A call that takes longer is reported."""
FINISH_SECONDS = 120.0
"""The longest wait for uploads when closing; the rest stays on disk for `wandb sync`."""
DATA_DIR = "WANDB_DATA_DIR"
"""The environment variable that says where wandb puts the files of tables until they are uploaded. Its default is in
the home folder, which on a cluster may be full or slow."""


class WandbError(OSError):
    """The error of a record that wandb cannot take."""


class WandbSink:
    """Logs to wandb, with its files under `run_dir/wandb`. A resumed run continues there and logs each step once.

    A run that continues another folder's is a wandb run of its own, because several may continue one: its
    configuration names the other under `continues`, and it is in that one's group unless wandb.group names another.

    Steps are sent as the metric `global_steps`, which is the x axis, and not as wandb's own step: wandb silently drops
    records of a step lower than the latest, and evaluations come late. The other axis is `timing_s/elapsed`; an
    evaluation has that of the latest step. The saved view of the project is made beside the run, in a thread of its
    own: when that fails, the run's log says so, and nothing else happens.

    Callers wait for wandb only at the start and at the end. What is logged while a call hangs counts as lost, but is
    sent if it returns. After an error nothing is sent.
    """

    name = "wandb"

    def __init__(
        self, run_dir: Path, wandb: WandbConfig, config: Mapping[str, Any], continues: Path | None = None
    ) -> None:
        """Start a wandb run or continue the one of this folder. The first call of `log` raises the error of a start.

        Args:
            config: the configuration that the dashboard shows.
            continues: the folder of the run that this one goes on from, which may be `run_dir`.
        """
        self._file = run_dir / STATE_FILE
        # The newest step and evaluation that wandb has, and the run's seconds at the newest step.
        self._known: dict[str, Any] = {"id": uuid.uuid4().hex[:8], "step": -1, "evaluation": -1, "elapsed": 0.0}
        self._run: Run | None = None
        self._takes_tables = True
        self._staging: str | None = None  # what DATA_DIR was set to
        self._makes_view = wandb.workspace and wandb.mode is WandbMode.online
        self._view = threading.Thread(target=self._make_view, daemon=True, name="wandb view")
        self._calls: SimpleQueue[tuple[str, Callable[[], None]] | None] = SimpleQueue()
        self._error: str | None = None
        self._current: tuple[str, float] | None = None  # the call that runs, and when it began
        started = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(started,), daemon=True, name="wandb")
        settings = {
            "dir": run_dir,
            "mode": wandb.mode.value,
            "entity": wandb.entity,
            "project": wandb.project,
            "name": wandb.name or run_dir.name,
            "group": wandb.group,
            "tags": list(wandb.tags),
            "config": dict(config),
        }
        self._calls.put(("starting", lambda: self._start(settings, continues)))
        self._thread.start()
        started.wait(START_SECONDS)

    def log(self, step: int, metrics: Mapping[str, float], samples: StepSamples | None = None) -> None:
        """Send `metrics` and `samples` under `global_steps = step`, in the background. Raises WandbError if wandb fails
        or hangs."""
        if self._error is None:  # afterwards nobody takes calls, and a long run would hold those of all its steps
            self._calls.put((f"logging step {step}", lambda: self._log(step, metrics, samples)))
        if problem := self._error or self._hanging():
            raise WandbError(problem)

    def close(self, exit_code: int) -> None:
        """Finish the run and end wandb's helper process. Wait for uploads for at most FINISH_SECONDS.

        Raises:
            WandbError: this call or an earlier one failed or hangs.
        """
        self._calls.put(("finishing", lambda: self._finish(exit_code)))
        self._calls.put(None)
        if (problem := self._error or self._hanging()) is None:
            self._thread.join(FINISH_SECONDS + 10)
            late = f"finishing has taken more than {FINISH_SECONDS + 10:g} s" if self._thread.is_alive() else None
            problem = self._error or late
        if problem is not None:
            raise WandbError(problem)

    def _hanging(self) -> str | None:
        """Name the call that has run for too long, if one has."""
        what, began = self._current or ("", math.inf)
        return f"{what} has taken more than {START_SECONDS:g} s" if time.monotonic() - began > START_SECONDS else None

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _work(self, started: threading.Event) -> None:
        while (call := self._calls.get()) is not None:
            what, action = call
            self._current = (what, time.monotonic())
            try:
                action()
            # All errors: wandb raises its own, ConnectionResetError, ImportError, and KeyboardInterrupt for a login
            # that a person breaks off.
            except BaseException as error:
                self._error = f"wandb failed while {what}: {type(error).__name__}: {error}"
                self._calls = SimpleQueue()
                return
            finally:
                self._current = None
                started.set()

    def _start(self, wanted: Mapping[str, Any], continues: Path | None) -> None:
        import wandb  # here, because it is slow and not needed when disabled

        wanted["dir"].mkdir(parents=True, exist_ok=True)
        if DATA_DIR not in os.environ:
            self._staging = os.environ[DATA_DIR] = str(wanted["dir"] / "wandb" / "staging")
        if self._file.exists():
            self._known = json.loads(self._file.read_text())
        elif continues is not None and (continues / STATE_FILE).exists():
            before = json.loads((continues / STATE_FILE).read_text())
            self._known["continues"] = {"id": before["id"], "run_dir": str(continues)}
            self._known["group"] = before.get("group")
        config = {**wanted["config"], "machine": asdict(describe_machine())}
        if "continues" in self._known:
            config["continues"] = self._known["continues"]
        group = self._known["group"] = wanted["group"] or self._known.get("group")
        settings = wandb.Settings(
            silent=True,
            console="off",  # wandb would otherwise wrap stdout under the live console
            init_timeout=START_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        made = {**wanted, "config": config, "group": group, "id": self._known["id"], "resume": "allow"}
        run = wandb.init(**made, settings=settings)
        run.define_metric(STEPS)
        run.define_metric(ELAPSED, step_metric=STEPS)
        run.define_metric("*", step_metric=STEPS)
        self._run = run
        if self._makes_view:
            self._view.start()

    def _log(self, step: int, metrics: Mapping[str, float], samples: StepSamples | None) -> None:
        """Log the record unless the dashboard has it: a resumed run takes some steps again."""
        assert self._run is not None
        kind = "evaluation" if EVALUATED & metrics.keys() else "step"
        if step <= self._known[kind]:
            return
        elapsed = self._known["elapsed"] = metrics.get(ELAPSED, self._known.get("elapsed", 0.0))
        histograms = {} if samples is None else {name: _histogram(one) for name, one in samples.histograms.items()}
        self._run.log({STEPS: step, ELAPSED: elapsed, **metrics, **histograms})
        if samples is not None and samples.rows and self._takes_tables:
            self._log_table(step, samples)
        self._known[kind] = step
        with suppress(OSError):  # at worst a resumed run logs a step again
            write_atomically(self._file, json.dumps(self._known).encode())

    def _log_table(self, step: int, samples: StepSamples) -> None:
        """Log a table, of which wandb makes an artifact. That may be refused: then the run goes on without tables."""
        assert self._run is not None
        try:
            self._run.log({STEPS: step, TRAJECTORIES_TABLE: _table(samples)})
        except Exception:
            self._takes_tables = False
            logger.warning("wandb: no tables of trajectories from step %d on", step, exc_info=True)

    def _finish(self, exit_code: int) -> None:
        import wandb

        if self._run is not None:
            self._run.finish(exit_code=exit_code)
        if self._view.ident is not None:  # of a run so short that it is not made yet
            self._view.join(START_SECONDS)
        wandb.teardown(exit_code=exit_code)
        if self._staging is not None and os.environ.get(DATA_DIR) == self._staging:
            del os.environ[DATA_DIR]  # the next job of a sweep has a folder of its own

    # -- in a thread of its own ----------------------------------------------------------------------------------------

    def _make_view(self) -> None:
        assert self._run is not None
        where = f"{self._run.entity}/{self._run.project}"
        try:
            address = ensure_workspace(self._run.entity, self._run.project)
        except ImportError as error:
            logger.warning("wandb: no saved view in %s: %s; pip install wandb-workspaces", where, error)
        except Exception:
            logger.warning("wandb: no saved view in %s", where, exc_info=True)
        else:
            logger.info("wandb: %s", f"{where} has the saved view" if address is None else f"saved view {address}")


def _histogram(histogram: Histogram) -> wandb.Histogram:
    import wandb

    return wandb.Histogram(np_histogram=(np.array(histogram.counts), np.array(histogram.edges)))


def _table(samples: StepSamples) -> wandb.Table:
    import wandb

    columns: list[Any] = [field.name for field in fields(TrajectoryRow)]
    return wandb.Table(columns=columns, data=[list(astuple(row)) for row in samples.rows])
