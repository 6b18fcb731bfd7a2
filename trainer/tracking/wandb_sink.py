"""wandb as a sink. wandb may raise, hang or be unreachable, so all its calls run in a thread of their own."""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from configs.schema import WandbConfig
from trainer.tracking.sinks import write_atomically

if TYPE_CHECKING:
    from wandb import Run

STATE_FILE = Path("wandb", "slipstream.json")
"""In the run folder: id and group of the wandb run, what it has, and which run it continues."""
START_SECONDS = 30.0
"""Deadline of wandb.init, which waits for the server when online. A call that takes longer is reported."""
FINISH_SECONDS = 120.0
"""Longest wait for uploads when closing; the rest stays on disk for `wandb sync`."""


class WandbError(OSError):
    """wandb cannot take a record."""


class WandbSink:
    """Logs to wandb, with its files under `run_dir/wandb`. A resumed run continues there and logs each step once.

    A run that continues another folder's is a wandb run of its own, because several may continue one: its
    configuration names the other under `continues`, and it is in that one's group unless wandb.group names another.

    Steps are sent as the metric `global_steps`, which is the x axis, and not as wandb's own step: wandb silently drops
    records of a step lower than the latest, and evaluations come late. Callers wait for wandb only at the start and at
    the end. What is logged while a call hangs counts as lost, but is sent if it returns. After an error nothing is
    sent.
    """

    name = "wandb"

    def __init__(
        self, run_dir: Path, wandb: WandbConfig, config: Mapping[str, Any], continues: Path | None = None
    ) -> None:
        """Start a wandb run or continue the one of this folder. The first call of `log` raises the error of a start.

        Args:
            config: shown on the dashboard as the run's configuration.
            continues: the folder of the run that this one goes on from, which may be `run_dir`.
        """
        self._file = run_dir / STATE_FILE
        self._known: dict[str, Any] = {"id": uuid.uuid4().hex[:8], "step": -1, "evaluation": -1}  # the last that it has
        self._run: Run | None = None
        self._calls: SimpleQueue[tuple[str, Callable[[], None]] | None] = SimpleQueue()
        self._error: str | None = None
        self._current: tuple[str, float] | None = None  # the call that runs, and when it began
        started = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(started,), daemon=True, name="wandb")
        given = {
            "dir": run_dir,
            "mode": wandb.mode.value,
            "entity": wandb.entity,
            "project": wandb.project,
            "name": wandb.name or run_dir.name,
            "group": wandb.group,
            "tags": list(wandb.tags),
            "config": dict(config),
        }
        self._calls.put(("starting", partial(self._start, given, continues)))
        self._thread.start()
        started.wait(START_SECONDS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send `metrics` under `global_steps = step`, in the background. Raises WandbError if wandb fails or hangs."""
        self._calls.put((f"logging step {step}", partial(self._log, step, metrics)))
        if problem := self._error or self._hanging():
            raise WandbError(problem)

    def close(self, exit_code: int) -> None:
        """Finish the run and end wandb's helper process. Wait for uploads for at most FINISH_SECONDS.

        Raises:
            WandbError: this call or an earlier one failed or hangs.
        """
        self._calls.put(("finishing", partial(self._finish, exit_code)))
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
                return
            finally:
                self._current = None
                started.set()

    def _start(self, given: Mapping[str, Any], continues: Path | None) -> None:
        import wandb  # here, because it is slow and not needed when disabled

        given["dir"].mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            self._known = json.loads(self._file.read_text())
        elif continues is not None and (continues / STATE_FILE).exists():
            before = json.loads((continues / STATE_FILE).read_text())
            self._known["continues"] = {"id": before["id"], "run_dir": str(continues)}
            self._known["group"] = before.get("group")
        config = dict(given["config"])
        if "continues" in self._known:
            config["continues"] = self._known["continues"]
        group = self._known["group"] = given["group"] or self._known.get("group")
        settings = wandb.Settings(
            silent=True,
            console="off",  # wandb would otherwise wrap stdout under the live console
            init_timeout=START_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        made = {**given, "config": config, "group": group, "id": self._known["id"], "resume": "allow"}
        run = wandb.init(**made, settings=settings)
        run.define_metric("global_steps")
        run.define_metric("*", step_metric="global_steps")
        self._run = run

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the record unless the dashboard has it: a resumed run takes some steps again."""
        assert self._run is not None
        kind = "evaluation" if "eval/accuracy" in metrics else "step"
        if step <= self._known[kind]:
            return
        self._run.log({"global_steps": step, **metrics})
        self._known[kind] = step
        with suppress(OSError):  # at worst a resumed run logs a step again
            write_atomically(self._file, json.dumps(self._known).encode())

    def _finish(self, exit_code: int) -> None:
        import wandb

        if self._run is not None:
            self._run.finish(exit_code=exit_code)
        wandb.teardown(exit_code=exit_code)
