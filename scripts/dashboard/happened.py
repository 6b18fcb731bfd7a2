"""Finds in the events of a run what a screen needs, without holding or reading all of them.

One pass over the files, a little at each call, decodes only what is rare (steps, updates, the fleet) into a `RunView`
and marks which time begins at which byte. What is frequent is read from there for a window of time.
"""

import re
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from rollout.events.event import kind_name
from rollout.events.kinds import ReplicaLoad
from scripts.dashboard.pages import read_page
from scripts.dashboard.runs import DashboardError
from trainer.tracking.events.kinds import KINDS
from trainer.tracking.events.lines import DamagedLineError, UnknownKindError, event_files, event_path, from_line
from trainer.tracking.events.reader import EventReader, Position
from trainer.tracking.events.view import RunView

MARK_BYTES = 1 << 20
"""Distance of marks in a file."""
WINDOW_BYTES = 64 << 20
"""Most that is read for a window."""
LATE_S = 5.0
"""By so many seconds events of other processes may come later in the file than the driver's."""
BUDGET_S = 0.5
"""How long one call looks on."""
KEPT = 4
"""Windows that are kept in memory."""
_RARE = [name for name, kind in KINDS.items() if not kind.is_frequent] + [kind_name(ReplicaLoad)]
_rare_lines = re.compile(rb'^\{"kind":"(?:' + "|".join(_RARE).encode() + rb')".*$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mark:
    """From this position on, events are of this time or later, or at most LATE_S earlier."""

    time: float
    position: Position


@dataclass(frozen=True, slots=True)
class Window:
    """Events of a span of time. `is_cut`: there were too many, and it ends early."""

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


class Happenings:
    """The events of one run folder.

    Example:
        happenings = Happenings(run_dir)
        while happenings.look() < 1.0:  # share of the bytes that were seen
            pass
        happenings.view.steps[7], happenings.of_steps(7, 9).view.groups
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._scan = _Scan()
        self._windows: dict[tuple[float, float, int], Window] = {}
        self._lock = threading.Lock()

    @property
    def view(self) -> RunView:
        """What is rare: steps, updates, the fleet, evaluations, checkpoints; no groups and no trajectories."""
        return self._scan.view

    @property
    def is_there(self) -> bool:
        return bool(event_files(self._run_dir))

    def look(self, budget_s: float = BUDGET_S) -> float:
        """Read on for so long. Returns the share of the bytes that were seen, 1 where there are none."""
        with self._lock:
            until = time.monotonic() + budget_s
            if self._was_replaced():
                self._scan, self._windows = _Scan(), {}
            while self._read_on() and time.monotonic() < until:
                pass
            return self._share()

    def of_steps(self, first: int, last: int) -> Window:
        """The events around the steps from `first` to `last`, with those of the groups that these trained. Raises
        DashboardError where a step is not there."""
        steps = self.view.steps
        known = sorted(number for number, step in steps.items() if step.start is not None)
        if not known or first not in known or last not in known or last < first:
            there = f"{known[0]} to {known[-1]} are there" if known else "there is none"
            raise DashboardError(f"steps={first}:{last}: not in the events; {there}")
        started = self.view.started
        context = 2 + (started.max_staleness if started else 1)
        early = known[max(0, known.index(first) - context)]
        after = known[known.index(last) + 1 :]
        until = self._began(after[0]) if after else self.view.last
        return self._window(self._began(early), self._began(first), until)

    def _began(self, step: int) -> float:
        start = self.view.steps[step].start
        assert start is not None
        return start

    def _window(self, early: float, since: float, until: float) -> Window:
        with self._lock:
            key = (early, until, self._scan.position.offset)
            if key not in self._windows:
                self._windows[key] = self._read_window(early, since, until)
            while len(self._windows) > KEPT:
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

    # -- the pass over the files ---------------------------------------------------------------------------------------

    def _was_replaced(self) -> bool:
        known = self._scan.identities
        there = {number: str(path.stat().st_ino) for number, path in event_files(self._run_dir)}
        return any(there.get(number) != identity for number, identity in known.items())

    def _read_on(self) -> bool:
        """Whether there was something."""
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
                continue  # the page shows what there is; `EventReader` counts them
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
        left = sizes.get(place.file, 0) - place.offset  # a last line without its end is no reason to look again
        return 1.0 if not total or (place.file >= max(sizes) and left < MARK_BYTES) else min(1.0, seen / total)
