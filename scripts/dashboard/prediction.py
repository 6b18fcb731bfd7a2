"""Ask the predictor about a run, for the page, in a process of its own.

The process has the lowest priority, works for one run at a time and for a bounded time. Its answer is kept until the
run has half as many steps more, or has ended.
"""

import atexit
import io
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from pebble import ProcessPool

if TYPE_CHECKING:  # the process that predicts imports this module, and the predictor itself only when it begins
    from scripts.observe.run import Run

FEWEST_STEPS = 6
"""The steps that a run must have before it is predicted from: the first ones warm up."""
SIMULATED_STEPS = 8
"""The steps that are simulated of each configuration."""
GROWTH = 1.5
"""The steps of a run over those of its last prediction at which a new one is due."""
TIMEOUT_S = 600.0
"""The longest that a prediction may take. On two busy cores, a run of 60 steps takes two and a half minutes."""
NICENESS = 19
"""The priority of the process that predicts, the lowest that there is."""
WORST_FIT = 0.25
"""The largest relative error of the simulation of the run's own steps with which others are predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A prediction for a run, or the reason why there is none."""

    steps: int
    """The number of steps that the run had."""
    text: str | None = None
    gain: float = 0.0
    about: str = ""
    """A sentence on what the prediction rests on."""
    why: str = ""


def predict_run(run_dir: Path, steps: int) -> Predicted:
    """Work out the advice for a run."""
    from scripts.predict.command import Arguments
    from scripts.predict.predict import predict
    from scripts.simulate.profile import PredictError

    try:
        with redirect_stdout(io.StringIO()):  # the tables are for the command line
            prediction = predict(Arguments(runs=(run_dir,), fixed={"steps": SIMULATED_STEPS}))
    except PredictError as error:
        return Predicted(steps=steps, why=str(error))
    (compared,) = prediction.compared
    if abs(compared.error) > WORST_FIT:
        return Predicted(steps=steps, why=f"the simulation of these {steps} steps is off by {compared.error:+.0%}")
    about = f"Predicted from the first {steps} steps, which the simulation reproduces within {abs(compared.error):.0%}."
    return Predicted(steps=steps, text=prediction.advice.text, gain=prediction.advice.gain, about=about)


class Predictor:
    """Keeps the latest prediction of each run, and begins new ones where they are due.

    Example:
        predictor = Predictor()
        predictor.latest(run, steps=40)  # None while the first one is being worked out
    """

    def __init__(self, predict: Callable[[Path, int], Predicted] = predict_run, timeout_s: float = TIMEOUT_S):
        self._predict, self._timeout_s = predict, timeout_s
        self._latest: dict[Path, Predicted] = {}
        self._under_way: tuple[Path, int, Future[Predicted]] | None = None
        # One worker that ends with its prediction, whose memory is large.
        self._pool = ProcessPool(
            max_workers=1, max_tasks=1, context=get_context("spawn"), initializer=os.nice, initargs=(NICENESS,)
        )
        atexit.register(self.close)

    @property
    def is_busy(self) -> bool:
        return self._under_way is not None and not self._under_way[2].done()

    def latest(self, run: "Run", steps: int) -> Predicted | None:
        """Return the latest prediction at once, and begin a new one if it is due and none is under way."""
        self._collect()
        if self._under_way is None and self._is_due(run, steps):
            future = self._pool.schedule(self._predict, args=[run.folder, steps], timeout=self._timeout_s)
            self._under_way = (run.folder, steps, future)
        return self._latest.get(run.folder)

    def wait(self) -> None:
        """Wait until no prediction is under way."""
        if self._under_way is not None:
            self._under_way[2].exception()
            self._collect()

    def close(self) -> None:
        """End the process that predicts."""
        self._pool.stop()
        self._pool.join()

    def _is_due(self, run: "Run", steps: int) -> bool:
        if steps < FEWEST_STEPS:
            return False
        latest = self._latest.get(run.folder)
        return latest is None or steps >= GROWTH * latest.steps or (run.has_ended and steps > latest.steps)

    def _collect(self) -> None:
        """Keep the prediction that was under way, if it is there."""
        if self._under_way is None or self.is_busy:
            return
        folder, steps, future = self._under_way
        self._under_way = None
        error = future.exception()
        if error is None:
            self._latest[folder] = future.result()
        elif isinstance(error, TimeoutError):
            why = f"it takes longer than {self._timeout_s:g} s; try `make predict`"
            self._latest[folder] = Predicted(steps=steps, why=why)
        else:
            self._latest[folder] = Predicted(steps=steps, why=f"{type(error).__name__}: {error}")
