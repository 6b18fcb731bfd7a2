"""What happened to the replicas of a run, with the time: `scripts.fleet status --history` shows it."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import BinaryIO

EVENTS_FILE = "fleet.jsonl"
"""Name of the file in the run folder. It is only ever appended to."""


class FleetEventKind(Enum):
    STARTING = "starting"
    IN_SERVICE = "in service"
    OUT_OF_SERVICE = "out of service"
    """It finishes its requests; the next update may bring it back."""
    DRAINING = "draining"
    LEFT = "left"
    """An operator removed it, or it has drained."""
    GIVEN_UP = "given up"
    PAUSED = "paused"
    RESUMED = "resumed"
    FAILED = "failed"
    """A pause or a resume failed."""


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """Example: FleetEvent(FleetEventKind.GIVEN_UP, "replica-1", "replica-1 is given up: its engine died")"""

    kind: FleetEventKind
    replica: str | None
    """None: all of them."""
    text: str
    """A sentence for a person."""


Report = Callable[[FleetEvent], None]


@dataclass(frozen=True, slots=True)
class FleetEventLog:
    """Appends each event to a file, and shows it. A full disk costs the file its line and not the run."""

    path: Path
    show: Callable[[str], None]

    def __call__(self, event: FleetEvent) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": time, "event": event.kind.value, "replica": event.replica, "text": event.text}
        self.show(event.text)
        try:
            with self.path.open("ab+") as file:
                cut = _is_cut(file)  # by a full disk, or the end of an earlier process
                file.write(b"\n" * cut + json.dumps(record).encode() + b"\n")
        except OSError as error:
            self.show(f"{self.path.name} cannot be written: {error}")


@dataclass(frozen=True, slots=True)
class PastEvent:
    time: datetime
    """In UTC."""
    event: FleetEvent


@dataclass(frozen=True, slots=True)
class History:
    events: Sequence[PastEvent]
    num_cut: int
    """Lines that are not whole, because a disk was full or a process was killed."""


def read_events(path: Path) -> History:
    """All events of a run, in order. Raises OSError."""
    lines = path.read_bytes().splitlines()
    events = [event for event in map(_parsed, lines) if event is not None]
    return History(events, num_cut=len(lines) - len(events))


def _parsed(line: bytes) -> PastEvent | None:
    """None for what is no event."""
    try:
        record = json.loads(line)
        event = FleetEvent(FleetEventKind(record["event"]), record["replica"], record["text"])
        return PastEvent(datetime.fromisoformat(record["time"]), event)
    except (ValueError, KeyError, TypeError):
        return None


def _is_cut(file: BinaryIO) -> bool:
    """Whether the last line has no end."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
