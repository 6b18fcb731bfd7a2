"""Output of processes that never fails: a print in a reward shall not cost its trajectory because a disk is full."""

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Lossy(io.FileIO):
    """A file that takes whatever is written. What finds no room is lost."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def never_fail_to_print() -> None:
    """Let standard output and standard error lose what cannot be written, instead of raising. Other processes that
    write into the same files, such as those of a shell command, see the error."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        buffer = io.BufferedWriter(_Lossy(descriptor, "w", closefd=False))
        stream = io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
