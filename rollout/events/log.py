"""Keep the events of a process on their way out: agent workers and replicas hold them until the driver asks."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollout.events.event import Event
from rollout.events.kinds import Noticed

MOST_KEPT = 50_000
"""Events that wait in a process. With more, nobody has asked for long, and the oldest are dropped and counted."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events that a process hands over at once.

    Example: EventBatch(first=120, now=8.5, times=(8.1, 8.4), events=(ReplicaHeld(...), ReplicaFrozen(...)))
    """

    first: int
    """The number of the first event among all of the process, so that a gap shows what was lost."""
    now: float
    """The monotonic clock of the process when it answered."""
    times: tuple[float, ...]
    """The time of each event, by the same clock."""
    events: tuple[Event, ...]


class EventLog:
    """The events of one process, by its monotonic clock.

    Example:
        log = EventLog()
        log.emit(ReplicaFrozen(global_steps=7))
        batch = log.take()  # in an answer to the driver
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_on: bool = True):
        """Keep events by a clock. With `is_on` false (trainer.events=false) all are ignored."""
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
        """Return the events that have come since the last call. If the answer is lost, so are they."""
        waiting, self._waiting = self._waiting, deque()
        first, self._first = self._first, self._first + len(waiting)
        times = tuple(time for time, _ in waiting)
        return EventBatch(first, self._clock(), times, tuple(event for _, event in waiting))

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the events here when the log is sent to another process, and ignore those of that process."""
        return partial(EventLog, is_on=False), ()


class Notices(logging.Handler):
    """Makes events of warnings, beside the log where they stand, so that the driver shows them to a person.

    Example: logging.getLogger("rollout.environments").addHandler(Notices(events))
    """

    def __init__(self, events: EventLog):
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self._events.emit(Noticed(record.getMessage()))


SILENT = EventLog(is_on=False)
"""The default of every process: a log that ignores all events."""
