"""A replica's processes on this machine, and how they are ended."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

import psutil

ProcessId = tuple[int, float]
"""pid, and the time of its creation, because pids are used again."""

GUARD_INTERVAL_S = 1.0
INTERVALS_PER_SCAN = 5
"""Looking for new descendants reads all processes of the machine, so it is done less often."""
SAME_S = 2.0
"""By how much two readings of one creation time may differ, when the clock was set in between."""


def process_tree(pid: int) -> list[ProcessId]:
    """Returns the process and all its descendants. Raises psutil.NoSuchProcess."""
    root = psutil.Process(pid)
    found = [(root.pid, root.create_time())]
    for process in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((process.pid, process.create_time()))
    return found


def kill_processes(processes: Iterable[ProcessId]) -> None:
    """Send SIGKILL, which ends stopped processes too, to those that still exist."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if _is_there(process):
                os.kill(process[0], signal.SIGKILL)


def _is_there(process: ProcessId) -> bool:
    try:
        found = psutil.Process(process[0])
        return abs(found.create_time() - process[1]) < SAME_S and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_descendants_with_this() -> None:
    """Start a guard process that kills everything this process starts once this process is gone, however it ended.
    vLLM's engine core does not notice by itself, and would keep the GPU's memory for good.

    The guard may not know processes that were started in the last few seconds.
    """
    owner = process_tree(os.getpid())[0]
    subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(owner)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # out of reach of a Ctrl-C
    )


def _guard(owner: ProcessId) -> None:
    descendants: set[ProcessId] = set()
    for interval in itertools.count():
        if not _is_there(owner):
            break
        if interval % INTERVALS_PER_SCAN == 0:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendants.update(process_tree(owner[0])[1:])
            descendants = set(filter(_is_there, descendants))
        time.sleep(GUARD_INTERVAL_S)
    kill_processes(process for process in descendants if process[0] != os.getpid())


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger stopped the process."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    _pid, _created = json.loads(sys.argv[1])
    _guard((_pid, _created))
