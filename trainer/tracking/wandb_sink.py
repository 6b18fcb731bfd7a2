"""wandb as a sink. wandb may raise, hang or be unreachable, so all its calls run in a thread of their own."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal

from trainer.tracking.sinks import write_atomically

if TYPE_CHECKING:
    from wandb import Run

WANDB_MODES: Final = ("offline", "online", "disabled")
START_SECONDS = 30.0
"""Deadline of wandb.init, which waits for the server when online."""
CALL_SECONDS = 60.0
"""A call that takes longer counts as hanging: records are dropped and counted until it returns."""
FINISH_SECONDS = 120.0
"""Longest wait for uploads when closing; the rest stays on disk for `wandb sync`."""
HANGING_SECONDS = 1.0
"""Longest wait when closing while a call hangs already."""

_Mode = Literal["offline", "online"]


class WandbError(OSError):
    """wandb cannot take a record."""


@dataclass(frozen=True, slots=True)
class WandbRun:
    """The content of wandb/slipstream.json in the run folder, by which a resumed run continues on the dashboard."""

    id: str
    step: int = -1
    """The last optimizer step that was logged."""
    evaluation: int = -1
    """The last version whose evaluation was logged."""


class WandbSink:
    """Logs to wandb, with its files under `run_dir/wandb`. A resumed run continues there and logs each step once.

    Steps are sent as the metric `global_steps`, which is the x axis, and not as wandb's own step: wandb silently drops
    records of a step lower than the latest, and evaluations come late. Callers wait for wandb only at the start and at
    the end.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, mode: str, project: str, name: str | None, config: Mapping[str, Any]) -> None:
        """Start a wandb run or continue the one of this folder. `mode="disabled"` does not even import wandb.

        It waits for at most START_SECONDS; the first call of `log` raises the error of a failed start.

        Args:
            name: None lets wandb choose one.
            config: shown on the dashboard as the run's configuration.

        Raises:
            ValueError: `mode` is not one of "offline", "online", "disabled".
        """
        if mode not in WANDB_MODES:
            raise ValueError(f"wandb mode must be one of {', '.join(WANDB_MODES)}, got {mode!r}")
        self._file = run_dir / "wandb" / "slipstream.json"
        self._known = WandbRun(id=uuid.uuid4().hex[:8])
        self._run: Run | None = None
        self._calls: SimpleQueue[tuple[str, Callable[[], None]] | None] = SimpleQueue()
        self._error: str | None = None
        self._busy: tuple[str, float] | None = None  # (the current call, when it began)
        self._thread: threading.Thread | None = None
        if mode == "disabled":
            return
        started = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="wandb")
        self._thread.start()
        self._calls.put(("starting", lambda: self._start(run_dir, mode, project, name, config)))
        self._calls.put(("starting", started.set))
        deadline = time.monotonic() + START_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline and not started.wait(0.01):
            pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send `metrics` under `global_steps = step`, in the background.

        Raises:
            WandbError: wandb has failed for good, or a call hangs. After a hang, later records may succeed.
        """
        if self._thread is None:
            return
        if self._error is not None:
            raise WandbError(self._error)
        hanging = self._hanging
        if hanging is not None:
            raise WandbError(f"{hanging} has taken more than {CALL_SECONDS:g} s")
        self._calls.put((f"logging step {step}", lambda: self._log(step, metrics)))

    def close(self, exit_code: int) -> None:
        """Finish the run and end wandb's helper process. Wait for uploads for at most FINISH_SECONDS.

        Raises:
            WandbError: this call or an earlier one failed.
        """
        if self._thread is None:
            return
        self._calls.put(("finishing", lambda: self._finish(exit_code)))
        self._calls.put(None)
        seconds = HANGING_SECONDS if self._hanging else FINISH_SECONDS + 10
        self._thread.join(seconds)
        is_stuck, self._thread = self._thread.is_alive(), None
        if is_stuck:
            raise WandbError(f"finishing has taken more than {seconds:g} s")
        if self._error is not None:
            raise WandbError(self._error)

    @property
    def _hanging(self) -> str | None:
        """The call that has taken too long, if there is one."""
        busy = self._busy
        return busy[0] if busy is not None and time.monotonic() - busy[1] > CALL_SECONDS else None

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            what, action = call
            self._busy = what, time.monotonic()
            try:
                action()
            # All errors: wandb raises its own, ConnectionResetError, ImportError and others.
            except Exception as error:
                self._error = f"wandb failed while {what}: {type(error).__name__}: {error}"
                return
            finally:
                self._busy = None

    def _start(self, run_dir: Path, mode: _Mode, project: str, name: str | None, config: Mapping[str, Any]) -> None:
        import wandb  # here, because it is slow and not needed when disabled

        run_dir.mkdir(parents=True, exist_ok=True)
        self._known = _read(self._file) or self._known
        settings = wandb.Settings(
            silent=True,
            console="off",  # wandb would otherwise wrap stdout under the live console
            init_timeout=START_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        run = wandb.init(
            dir=run_dir,
            mode=mode,
            project=project,
            name=name,
            id=self._known.id,
            resume="allow",
            config=dict(config),
            settings=settings,
        )
        run.define_metric("global_steps")
        run.define_metric("*", step_metric="global_steps")
        self._run = run

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the record unless the dashboard has it: a resumed run takes some steps again."""
        assert self._run is not None
        kind = "evaluation" if "eval/accuracy" in metrics else "step"
        if step <= (self._known.evaluation if kind == "evaluation" else self._known.step):
            return
        self._run.log({"global_steps": step, **metrics})
        self._known = replace(self._known, **{kind: step})
        with suppress(OSError):  # at worst a resumed run logs a step again
            write_atomically(self._file, json.dumps(asdict(self._known)).encode())

    def _finish(self, exit_code: int) -> None:
        import wandb

        if self._run is not None:
            self._run.finish(exit_code=exit_code)
        wandb.teardown(exit_code=exit_code)


def _read(path: Path) -> WandbRun | None:
    return WandbRun(**json.loads(path.read_text())) if path.exists() else None
