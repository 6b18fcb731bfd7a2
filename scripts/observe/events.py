"""Read the events of a run folder: as they come, all that still count, or those of a few steps.

Any folder will do, of a run that is live, has ended, was killed or was copied. A line that is not a whole event is
counted and skipped.
"""

import re
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollout.events.event import OfStep, Stamped, kind_name
from rollout.events.kinds import GroupDiscarded, ReplicaLoad
from scripts.observe.files import RunError, file_identity, read_page
from scripts.observe.view import RunView
from trainer.tracking.events.kinds import KINDS, Resumed
from trainer.tracking.events.lines import DamagedLineError, UnknownKindError, event_files, event_path, from_line

CHUNK_BYTES = 4 << 20
"""The number of bytes that are read at a time."""
LATE_S = 5.0
"""The seconds by which events of other processes may come later in the file than the driver's: replicas and agent
workers are asked for theirs once a second."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two lines, from which another reader can go on later."""

    file: int = 1
    """1 is events.jsonl, 2 is events.2.jsonl."""
    offset: int = 0
    """Bytes from the start of the file."""


class EventReader:
    """Follows the events of a run, live ones too.

    Events come in the order of the file. Those of one process are in the order of their times; those of a replica come
    up to a second later than the driver's.

    Example:
        reader = EventReader(run_dir)
        while True:
            for stamped in reader.read():  # the events that have come since the last call; [] if there are none
                view.add(stamped)
            time.sleep(1)
    """

    def __init__(self, run_dir: Path, position: Position | None = None):
        self._run_dir = run_dir
        self.position = position or Position()
        self.num_damaged = 0
        """The number of lines that are not whole, such as the last one of a killed process or of a full disk."""
        self.num_unknown = 0
        """The number of events of kinds that this version does not know."""
        self._identity = ""  # of the file that is being read

    def read(self, max_bytes: int = CHUNK_BYTES) -> list[Stamped]:
        """Return the next events, about `max_bytes` of them, or none if nothing has come since the last call.

        A last line without its newline is left for later, because its writer may be in the middle of it. Raises
        OSError, but not for a missing file.
        """
        while True:
            # Look for the next file before reading this one: once there is a next one, this one grows no more.
            later = [number for number, _ in event_files(self._run_dir) if number > self.position.file]
            if lines := self._lines(max_bytes):
                if events := [stamped for stamped in map(self._parse, lines) if stamped is not None]:
                    return events
            elif not later:
                return []
            else:
                self._leave_for(min(later))

    def __iter__(self) -> Iterator[Stamped]:
        """Yield all events that there are now."""
        while events := self.read():
            yield from events

    def _lines(self, max_bytes: int) -> tuple[bytes, ...]:
        """Return whole lines from the position on, and move the position behind them."""
        place = self.position
        page = read_page(event_path(self._run_dir, place.file), place.offset, self._identity, max_bytes)
        if page.is_new and place.offset:
            return ()  # the writer has thinned the file meanwhile: the offset means nothing in the new one
        self.position, self._identity = Position(place.file, page.offset), page.identity
        return page.lines

    def _leave_for(self, next_file: int) -> None:
        path = event_path(self._run_dir, self.position.file)
        is_thinned = path.exists() and self._identity not in ("", file_identity(path.stat()))
        self.num_damaged += path.exists() and path.stat().st_size > self.position.offset and not is_thinned
        self.position, self._identity = Position(next_file), ""

    def _parse(self, line: bytes) -> Stamped | None:
        try:
            return from_line(line)
        except UnknownKindError:
            self.num_unknown += 1
        except DamagedLineError:
            self.num_damaged += bool(line.strip())
        return None


def valid_events(run_dir: Path) -> Iterator[Stamped]:
    """Yield the events of the run in the order of the file, without those that a later `Resumed` supersedes.

    The files are read twice, so that none of the events has to be kept in memory.
    """
    resumes = [
        (number, stamped.event.global_steps)
        for number, stamped in enumerate(EventReader(run_dir))
        if isinstance(stamped.event, Resumed)
    ]
    for number, stamped in enumerate(EventReader(run_dir)):
        while resumes and resumes[0][0] <= number:
            resumes.pop(0)
        last = min((step for _, step in resumes), default=1 << 62)
        if not isinstance(stamped.event, OfStep | GroupDiscarded) or stamped.event.global_steps <= last:
            yield stamped


# -- the index ---------------------------------------------------------------------------------------------------------

MARK_BYTES = 1 << 20
"""The distance between two marks in a file."""
WINDOW_BYTES = 64 << 20
"""The most that is read for a window."""
BUDGET_S = 0.5
"""The seconds for which one call reads on."""
WINDOWS_KEPT = 4
"""The number of windows that stay in memory."""
_RARE = [name for name, kind in KINDS.items() if not kind.is_frequent] + [kind_name(ReplicaLoad)]
_rare_lines = re.compile(rb'^\{"kind":"(?:' + "|".join(_RARE).encode() + rb')".*$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mark:
    """A position from which on events are of this time or later, or at most LATE_S earlier."""

    time: float
    position: Position


@dataclass(frozen=True, slots=True)
class Window:
    """The events of a span of time. `is_cut` says that there were too many, so that it ends early."""

    view: RunView
    since: float
    until: float
    is_cut: bool


@dataclass(slots=True)
class _Scan:
    view: RunView = field(default_factory=RunView)
    marks: list[Mark] = field(default_factory=list)
    position: Position = field(default_factory=Position)
    identities: dict[int, str] = field(default_factory=dict)


class EventIndex:
    """Finds the events of a few steps without holding or decoding all of them.

    One pass over the files, a little at each call, decodes only the rare kinds (steps, updates, the fleet) into a view
    and marks which time begins at which byte. The frequent kinds are read from there, for a window of time. It is for
    one thread at a time, as the page makes its answers.

    Example:
        index = EventIndex(run_dir)
        while index.read_on() < 1.0:  # the share of the bytes that were read
            pass
        index.view.steps[7], index.read_steps(7, 9).view.groups
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._scan = _Scan()
        self._windows: dict[tuple[float, float, int], Window] = {}

    @property
    def view(self) -> RunView:
        """The rare kinds: steps, updates, the fleet, evaluations, checkpoints; no groups and no trajectories."""
        return self._scan.view

    @property
    def has_events(self) -> bool:
        return bool(event_files(self._run_dir))

    def read_on(self, budget_s: float = BUDGET_S) -> float:
        """Read on for so many seconds. Return the share of the bytes that were read, 1 if there are none."""
        until = time.monotonic() + budget_s
        now = {number: file_identity(path.stat()) for number, path in event_files(self._run_dir)}
        if any(now.get(number) != identity for number, identity in self._scan.identities.items()):
            self._scan, self._windows = _Scan(), {}  # a file was thinned meanwhile
        while self._read_page() and time.monotonic() < until:
            pass
        return self._share()

    def read_steps(self, first: int, last: int) -> Window:
        """Return the events around the steps from `first` to `last`, and those of the groups that they trained.

        Raises:
            RunError: one of the steps is not in the events.
        """
        starts = {number: step.start for number, step in self.view.steps.items() if step.start is not None}
        known = sorted(starts)
        if not known or first not in known or last not in known or last < first:
            there = f"{known[0]} to {known[-1]} are there" if known else "there is none"
            raise RunError(f"steps={first}:{last}: not in the events; {there}")
        started = self.view.started
        # A group that a step trains was claimed at most max_staleness versions before it, give or take one.
        context = 2 + (started.max_staleness if started else 1)
        early = known[max(0, known.index(first) - context)]
        after = known[known.index(last) + 1 :]
        until = starts[after[0]] if after else self.view.last
        key = (starts[early], until, self._scan.position.offset)
        if key not in self._windows:
            self._windows[key] = self._read_window(starts[early], starts[first], until)
        while len(self._windows) > WINDOWS_KEPT:
            del self._windows[next(iter(self._windows))]
        return self._windows[key]

    def _read_window(self, early: float, since: float, until: float) -> Window:
        view, num_bytes = RunView(), 0
        marks = self._scan.marks
        place = max(0, bisect_right([mark.time for mark in marks], early - LATE_S) - 1)
        reader = EventReader(self._run_dir, marks[place].position if marks else None)
        while events := reader.read(MARK_BYTES):
            for stamped in events:
                if stamped.time <= until:
                    view.add(stamped)
            num_bytes += MARK_BYTES
            if all(stamped.time > until + LATE_S for stamped in events):
                return Window(view, since, until, is_cut=False)
            if num_bytes >= WINDOW_BYTES:
                return Window(view, since, min(until, events[-1].time), is_cut=True)
        return Window(view, since, until, is_cut=False)

    def _read_page(self) -> bool:
        """Take the next page of the files into the view. Return whether there was one."""
        scan = self._scan
        later = [number for number, _ in event_files(self._run_dir) if number > scan.position.file]
        page = read_page(event_path(self._run_dir, scan.position.file), scan.position.offset, max_bytes=MARK_BYTES)
        if page.offset == scan.position.offset:
            if later:
                scan.position = Position(min(later))
            return bool(later)
        scan.identities[scan.position.file] = page.identity
        self._mark(page.lines)
        for line in _rare_lines.findall(b"\n".join(page.lines)):
            try:
                scan.view.add(from_line(line))
            except (DamagedLineError, UnknownKindError):
                continue  # the page shows what there is; `EventReader` counts the rest
        scan.position = Position(scan.position.file, page.offset)
        return True

    def _mark(self, lines: tuple[bytes, ...]) -> None:
        for line in lines:
            try:
                stamped = from_line(line)
            except (DamagedLineError, UnknownKindError):
                continue
            last = self._scan.marks[-1].time if self._scan.marks else stamped.time
            self._scan.marks.append(Mark(max(last, stamped.time), self._scan.position))
            return

    def _share(self) -> float:
        sizes = {number: path.stat().st_size for number, path in event_files(self._run_dir)}
        total = sum(sizes.values())
        place = self._scan.position
        seen = sum(size for number, size in sizes.items() if number < place.file) + place.offset
        left = sizes.get(place.file, 0) - place.offset  # a last line without its end is no reason to read again
        return 1.0 if not total or (place.file >= max(sizes) and left < MARK_BYTES) else min(1.0, seen / total)
