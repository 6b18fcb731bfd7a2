"""Events on their way out of a process: agent workers and replicas keep them until the driver asks."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout.events.event import Event
from rollout.events.kinds import Noticed

MOST_KEPT = 50_000
"""Events that wait in a process. With more, nobody has asked for long, and the oldest are dropped and counted."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What a process hands over at once.

    Example: EventBatch(first=120, now=8.5, times=(8.1, 8.4), events=(ReplicaHeld(...), ReplicaFrozen(...)))
    """

    first: int
    """The number of the first event among all of the process, so that a gap shows what was lost."""
    now: float
    """The monotonic clock of the process when it answered."""
    times: tuple[float, ...]
    """By the same clock, of each event."""
    events: tuple[Event, ...]


class EventLog:
    """The events of one process, by its monotonic clock.

    Example:
        log = EventLog()
        log.emit(ReplicaFrozen(global_steps=7))
        batch = log.take()  # in an answer to the driver
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_on: bool = True):
        """`is_on`: False takes nothing in (trainer.events=false)."""
        self._clock = clock
        self._is_on = is_on
        self._waiting: deque[tuple[float, Event]] = deque()
        self._first = 0

    def emit(self, event: Event) -> None:
        if not self._is_on:
            return
        if len(self._waiting) >= MOST_KEPT:
            self._waiting.popleft()
            self._first += 1
        self._waiting.append((self._clock(), event))

    def take(self) -> EventBatch:
        """What has come since the last call. An answer that is lost costs its events."""
        waiting, self._waiting = self._waiting, deque()
        first, self._first = self._first, self._first + len(waiting)
        times = tuple(time for time, _ in waiting)
        return EventBatch(first, self._clock(), times, tuple(event for _, event in waiting))

    def __reduce__(self) -> tuple[Any, ...]:
        """What is sent to another process leaves the events here, and those of there reach nobody."""
        return _silent, ()


class Notices(logging.Handler):
    """Makes events of warnings, beside the log where they stand, so that the driver shows them to a person.

    Example: logging.getLogger("rollout.search").addHandler(Notices(events))
    """

    def __init__(self, events: EventLog):
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self._events.emit(Noticed(record.getMessage()))


def _silent() -> EventLog:
    return EventLog(is_on=False)


SILENT = _silent()
"""For whom nobody listens to."""
