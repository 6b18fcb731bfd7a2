"""Reads the events of a run folder: as they come, by place in the file, or all that still count.

It takes any folder: of a run that goes on, has ended, was killed or was copied. What is no whole event is counted and
passed over.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollout.events.event import Event, OfStep, Stamped
from rollout.events.kinds import GroupDiscarded
from trainer.tracking.events.kinds import Resumed
from trainer.tracking.events.lines import DamagedLineError, UnknownKindError, event_files, event_path, from_line

CHUNK = 4 << 20
"""Bytes that are read at a time."""
NO_STEP = -2
"""Of what belongs to no step."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two lines. It can be kept, and read on from by another reader."""

    file: int = 1
    """1 is events.jsonl, 2 is events.2.jsonl."""
    offset: int = 0
    """Bytes."""


class EventReader:
    """Follows the events of a run, those of a live one too.

    Events come in the order of the file. Those of one process are in the order of their times; a replica's come up to
    a second later than the driver's.

    Example:
        reader = EventReader(run_dir)
        while True:
            for stamped in reader.read():  # what has come since; [] when nothing has
                view.add(stamped)
            time.sleep(1)
    """

    def __init__(self, run_dir: Path, position: Position | None = None):
        self._run_dir = run_dir
        self.position = position or Position()
        self.num_damaged = 0
        """Lines that are not whole: the end of a killed process, or of a full disk."""
        self.num_unknown = 0
        """Events of kinds that this version does not know."""
        self._identity: tuple[int, int] | None = None  # of the file that is being read

    def read(self, max_bytes: int = CHUNK) -> list[Stamped]:
        """The next events, of about so many bytes; none when nothing has come since. A last line without its end is
        left for later: its writer may be at it. Raises OSError, but not for files that are not there."""
        while True:
            next_file = self._next_file()  # looked for first: where there is one, this one grows no more
            if lines := self._lines(max_bytes):
                found = [self._parsed(line) for line in lines.split(b"\n")[:-1]]
                if events := [one for one in found if one is not None]:
                    return events
            elif next_file is None:
                return []
            else:
                self._leave_for(next_file)

    def __iter__(self) -> Iterator[Stamped]:
        """All that there is now."""
        while events := self.read():
            yield from events

    def _lines(self, max_bytes: int) -> bytes:
        """Whole lines from the position on, which moves behind them."""
        place = self.position
        try:
            with event_path(self._run_dir, place.file).open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if place.offset and self._identity not in (None, identity):
                    return b""  # thinned meanwhile: what was left of it is not there any more
                self._identity = identity
                file.seek(place.offset)
                data = file.read(max_bytes)
                while data and b"\n" not in data:
                    more = file.read(max_bytes)
                    data += more
                    if not more:
                        break
        except FileNotFoundError:
            return b""
        whole = data[: data.rfind(b"\n") + 1]
        self.position = Position(place.file, place.offset + len(whole))
        return whole

    def _next_file(self) -> int | None:
        return min((number for number, _ in event_files(self._run_dir) if number > self.position.file), default=None)

    def _leave_for(self, next_file: int) -> None:
        path = event_path(self._run_dir, self.position.file)
        is_cut = path.exists() and path.stat().st_size > self.position.offset and not self._is_thinned(path)
        self.num_damaged += is_cut
        self.position, self._identity = Position(next_file), None

    def _is_thinned(self, path: Path) -> bool:
        status = path.stat()
        return self._identity not in (None, (status.st_dev, status.st_ino))

    def _parsed(self, line: bytes) -> Stamped | None:
        try:
            return from_line(line)
        except UnknownKindError:
            self.num_unknown += 1
        except DamagedLineError:
            self.num_damaged += bool(line.strip())
        return None


def step_of(event: Event) -> int:
    """The step or version that the event belongs to; NO_STEP where it belongs to none."""
    return event.global_steps if isinstance(event, OfStep | GroupDiscarded) else NO_STEP


def still_valid(run_dir: Path) -> Iterator[Stamped]:
    """All events of the run in the order of the file, without those that a `Resumed` supersedes. It reads the files
    twice, and holds none in memory."""
    resumes = [
        (number, stamped.event.global_steps)
        for number, stamped in enumerate(EventReader(run_dir))
        if isinstance(stamped.event, Resumed)
    ]
    for number, stamped in enumerate(EventReader(run_dir)):
        while resumes and resumes[0][0] <= number:
            resumes.pop(0)
        if step_of(stamped.event) <= min((to for _, to in resumes), default=1 << 62):
            yield stamped
