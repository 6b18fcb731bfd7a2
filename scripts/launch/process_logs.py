"""The log files of a run's processes: what a process and its children print, up to a size."""

import os
import threading
from pathlib import Path

from rollout.actors.output import never_fail_to_print

LIMIT_BYTES = 256 * 2**20
"""The size at which a log begins anew: a reward that prints every response fills a disk in hours."""
KEPT_BYTES = 4 * 2**20
"""The end of a full log, which stays."""
LOOK_S = 30.0


def write_output_to(path: Path) -> None:
    """Let the output of this process, and of the children that it starts, go to the end of a file, and keep the file
    within `LIMIT_BYTES` or what is printed in `LOOK_S`. Where there is no room, what is printed is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    never_fail_to_print()
    threading.Thread(target=_keep_small, args=(path,), name="log-size", daemon=True).start()


def _keep_small(path: Path) -> None:
    wait = threading.Event()
    while not wait.wait(LOOK_S):
        cut(path, LIMIT_BYTES, KEPT_BYTES)


def cut(path: Path, limit: int, kept: int) -> None:
    """Leave only the end of a log that is longer than `limit`. Every writer appends, so each goes on behind it; what is
    printed while this copies may be lost."""
    try:
        size = path.stat().st_size
        if size <= limit:
            return
        with path.open("r+b") as file:
            file.seek(size - kept)
            end = file.read()
            file.truncate(0)
        with path.open("ab") as file:
            file.write(f"[the log was longer than {limit} bytes: the first {size - kept} are gone]\n".encode() + end)
    except OSError:  # the folder was moved or the disk is full: nothing is worth ending the process for
        return
