"""Files that a run leaves behind, on a disk that may be full or gone: whole or not at all, and never worth a run."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
"""Ends the name of a file that is being written."""


def write_atomically(path: Path, data: bytes) -> None:
    """Makes the folder, writes beside `path`, renames: a kill at any moment leaves the old file or the new one, and at
    most a file that ends in `PARTIAL`. Raises OSError, after which there is neither."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + PARTIAL)
    try:
        aside.write_bytes(data)
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: str) -> None:
    """Makes the folder and appends, after cutting what a write that broke off has left of a line. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        end = _end_of_last_line(file)
        data = line.encode() + b"\n"
        if file.write(data) < len(data):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _end_of_last_line(file: FileIO) -> int:
    """Cuts what comes after the last newline."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return 0
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return size
    file.seek(0)
    end = file.read(size).rfind(b"\n") + 1
    logger.warning("%s: cutting a torn last line of %d bytes", file.name, size - end)
    file.truncate(end)
    return end


class FailedWrites:
    """Counts what could not be written, by destination, and says so once for each. A later write may work again."""

    def __init__(self, report: Callable[[str], None] = logger.warning):
        self.counts: dict[str, int] = {}
        self._report = report

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @contextmanager
    def tolerated(self, destination: str) -> Iterator[None]:
        """An OSError from the block is counted, and goes no further."""
        try:
            yield
        except OSError as error:
            if destination not in self.counts:
                self._report(f"{destination} cannot be written, the training goes on: {error}")
            self.counts[destination] = self.counts.get(destination, 0) + 1
