"""The processes of one replica on this machine, and their end."""

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
"""pid, and when it was created: pids are used again."""

GUARD_INTERVAL_S = 1.0
INTERVALS_PER_SCAN = 5
"""To look for new descendants goes through all processes of the machine."""
SAME_S = 2.0
"""Two processes may think of the time of a third one's creation so differently, when the clock was set in between."""


def process_tree(pid: int) -> list[ProcessId]:
    """A process and all its descendants. Raises psutil.NoSuchProcess."""
    root = psutil.Process(pid)
    found = [(root.pid, root.create_time())]
    for process in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((process.pid, process.create_time()))
    return found


def kill_processes(processes: Iterable[ProcessId]) -> None:
    """SIGKILL, which ends stopped processes too. Those that are gone already are passed over."""
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
    """From now on a process of its own sees to it that all that this one starts is killed when this one is gone,
    however that ended: vLLM's engine core does not notice, and would keep the GPU's memory for good.

    What was started in the last few seconds before may not be known to it.
    """
    owner = process_tree(os.getpid())[0]
    subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(owner)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is not for it
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
    """By SIGSTOP, or by a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    _pid, _created = json.loads(sys.argv[1])
    _guard((_pid, _created))
