"""Keep how far a run is: what goes on and since when, its steps and their pace, its accuracies. Consoles show it."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

PACE_STEPS = 20
"""The time that is left is estimated from the latest steps."""


@dataclass(slots=True)
class Activity:
    """Something that goes on."""

    text: str
    since: float
    """The time at which it began, on the clock of its `Progress`."""
    detail: str = ""
    """The state of it, in its own words."""


@dataclass(kw_only=True)
class Progress:
    """The progress of a run, without how it is shown.

    Example:
        progress = Progress(total_steps=60)
        activity = progress.begin("loading vLLM")
        progress.take_step(1)
        progress.remaining_s()
    """

    total_steps: int
    clock: Callable[[], float] = time.monotonic
    global_steps: int = 0
    """Optimizer steps taken."""
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of (global_steps, held-out accuracy in [0, 1]) for every evaluation, those before a resume included."""
    activities: list[Activity] = field(default_factory=list)
    """The activities that go on now, the oldest first."""

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._latest: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self._began

    def begin(self, text: str) -> Activity:
        activity = Activity(text, self.clock())
        self.activities.append(activity)
        return activity

    def end(self, activity: Activity) -> float:
        """Return the seconds that it took."""
        self.activities.remove(activity)
        return self.clock() - activity.since

    def take_step(self, global_steps: int) -> None:
        self.global_steps = global_steps
        self._latest.append((global_steps, self.clock()))

    def continue_from(self, global_steps: int, accuracies: Iterable[tuple[int, float]]) -> None:
        """Take over what an earlier process of the run reached."""
        self.global_steps = global_steps
        self.accuracies = list(accuracies)

    def remaining_s(self) -> float | None:
        """Return the seconds until the last step at the pace of the latest ones, or None before there are two."""
        if len(self._latest) < 2:
            return None
        (first, began), (last, ended) = self._latest[0], self._latest[-1]
        left = (self.total_steps - last) * (ended - began) / (last - first)
        return max(0.0, left - (self.clock() - ended))


def duration(seconds: float | None) -> str:
    """Return seconds as a clock shows them: 83.4 is "1:23", 3700 is "1:01:40", and None is "-"."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
