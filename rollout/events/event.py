"""Events: something that happens in a run, as a frozen dataclass. They are the lines of events.jsonl.

An event says what happened, its `Stamped` when and in which process. Where something begins and ends there are two
kinds: a run that is killed leaves the first alone. The kinds are in `rollout.events.kinds`, the trainer's in
`trainer.tracking.events.kinds`; docs/observe.md has the table.

`global_steps` is a number of steps taken: the version of weights or, of a step, what it makes of it. So step
number 7 of a run, which trains weights 6 into weights 7, is 7 everywhere.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The base of all kinds."""

    is_frequent: ClassVar[bool] = False
    """True if there are many of the kind per trajectory or second. Such events are left out with trainer.events=false,
    and are dropped first where the files of events grow too large."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event with its place in time."""

    time: float
    """The time in seconds since the epoch, on the driver's clock (`rollout.events.clock`)."""
    who: str
    """The process: `driver`, or the name of a replica or an agent worker."""
    event: Event


Emit = Callable[[Event], None]
"""Takes an event that happens now. It returns at once, and raises nothing."""


def nobody(event: Event) -> None:
    """Ignore the event: the default of everything that emits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStep(Event):
    """Something that happens to a step or a version. A resume from an earlier checkpoint supersedes it."""

    global_steps: int


def finite(number: float) -> float | None:
    """JSON has no other numbers."""
    return number if math.isfinite(number) else None


def kind_name(kind: type[Event]) -> str:
    """Return the name of a kind in events.jsonl: that of `ReplicaFrozen` is "replica_frozen"."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).lstrip("_")


def kinds_in(names: Mapping[str, object], besides: Collection[type[Event]] = ()) -> dict[str, type[Event]]:
    """Return the kinds among a module's names, by their names in events.jsonl, without the base classes `besides`."""
    return {
        kind_name(kind): kind
        for kind in list(names.values())
        if isinstance(kind, type) and issubclass(kind, Event) and kind not in (Event, OfStep, *besides)
    }
