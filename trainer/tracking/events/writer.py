"""Write events.jsonl in a thread of the driver, so that nothing in the path of training waits for the disk.

Events wait in a bounded queue. What the disk cannot take, because it is too slow or full, is dropped and counted, and
the count is an event of its own once it can be written. Files are only appended to. At FILE_MB the next one begins.
Beyond MAX_MB in all, the oldest file keeps its rare events only (replicas, steps, evaluations, checkpoints);
when no file has others any more, the oldest goes as a whole.
"""

import os
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout.events.event import Stamped
from rollout.events.kinds import EventsDropped
from trainer.tracking.events.lines import EVENTS_FILE, event_files, event_path, is_frequent, to_line
from trainer.tracking.sinks import FailedWrites, write_atomically

MOST_WAITING = 200_000
"""Events in the queue: some 100 MB of memory."""
FILE_MB = 64
MAX_MB = 2048
"""Megabytes of all files together: a bound for the disk that a run takes. Rare events are the last to go."""
FLUSH_S = 0.25
"""Events wait so long at most, to be written together."""
MB = 1_000_000


@dataclass(kw_only=True, eq=False)
class EventWriter:
    """The only writer of a run folder's events.

    Example:
        with EventWriter(run_dir=run_dir, failed=failed) as writer:
            events = DriverEvents(writer.put)
            events.emit(UpdateStarted(global_steps=7))
        # all that was put is in the file
    """

    run_dir: Path
    failed: FailedWrites
    """Counts writes that failed, and reports the first."""
    max_mb: int = MAX_MB
    max_waiting: int = MOST_WAITING
    file_bytes: int = field(init=False)
    num_dropped: int = field(default=0, init=False)
    """Events that are not in the files, or not any more. Those that other processes lost are not in it."""

    def __post_init__(self) -> None:
        self.file_bytes = min(FILE_MB * MB, max(1, self.max_mb * MB // 4))
        self._waiting: deque[Stamped] = deque()
        self._untold: Counter[str] = Counter()  # dropped, and not in the file as an event
        self._wake, self._ends = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # guards the counts, which the driver's thread and this one change
        self._writing = threading.Lock()  # held by `flush`, which tests and the thread may call at the same time
        self._time = 0.0  # of the event written last: that of the writer's own, too
        self._thin: set[int] = set()  # files without frequent events
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def __enter__(self) -> "EventWriter":
        self.start()
        return self

    def start(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def put(self, stamped: Sequence[Stamped]) -> None:
        """Take events to write. It returns at once, and raises nothing."""
        room = self.max_waiting - len(self._waiting)
        self._waiting.extend(stamped[:room] if room < len(stamped) else stamped)
        if room < len(stamped):
            self._drop(len(stamped) - max(0, room), "queue")
        if len(self._waiting) > self.max_waiting // 2:
            self._wake.set()

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits. What a disk that hangs does not take in time is left."""
        self._ends.set()
        self._wake.set()
        self._thread.join(timeout_s)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            is_last = self._ends.is_set()
            self.flush(is_last=is_last)
            if is_last:
                return

    def flush(self, *, is_last: bool = False) -> None:
        """Write what waits. `is_last`: counts of what was dropped too, which otherwise go with the next events."""
        with self._writing:
            while self._waiting or (is_last and self._untold):
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), 5_000))]
                self._time = batch[-1].time if batch else self._time
                with self._lock:
                    reported, self._untold = self._untold, Counter()
                    total = self.num_dropped
                counts = [
                    Stamped(self._time, "driver", EventsDropped(count=count, total=total, why=why))
                    for why, count in reported.items()
                ]
                try:
                    self._append(b"".join(map(to_line, [*batch, *counts])))
                    self._make_room()
                except OSError as error:
                    with self._lock:
                        self._untold.update(reported)
                    self._drop(len(batch), "disk")
                    with self.failed.tolerated(EVENTS_FILE):
                        raise error
                    return  # until the next time

    def _drop(self, count: int, why: str) -> None:
        with self._lock:
            self.num_dropped += count
            self._untold[why] += count

    def _append(self, data: bytes) -> None:
        """Append to the last file. Raises OSError, and then nothing of the data stays in the file."""
        files = event_files(self.run_dir)
        number = files[-1].number if files else 1
        path = event_path(self.run_dir, number)
        if path.exists() and path.stat().st_size >= self.file_bytes:
            path = event_path(self.run_dir, number + 1)
        with path.open("ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":  # the last line of a process that was killed
                data = b"\n" + data
            written = file.write(data)
            if written < len(data):
                file.truncate(end)
                raise OSError(28, os.strerror(28), str(path))

    def _make_room(self) -> None:
        """Thin or remove the oldest files while all are larger than they may be. The last one is left. Raises
        OSError."""
        while True:
            files = event_files(self.run_dir)
            if len(files) < 2 or sum(path.stat().st_size for _, path in files) <= self.max_mb * MB:
                return
            full = [file for file in files[:-1] if file.number not in self._thin]
            number, path = full[0] if full else files[0]
            num_lines, kept = 0, []
            with path.open("rb") as lines:
                for line in lines:
                    num_lines += 1
                    if full and not is_frequent(line):
                        kept.append(line)
            if kept:
                write_atomically(path, b"".join(kept))
            else:
                path.unlink()
            self._thin.add(number)
            if num_lines > len(kept):
                self._drop(num_lines - len(kept), "size")
