"""The processes of one replica on this machine, and their end."""

import contextlib
import os
import signal
from collections.abc import Iterable

import psutil

ProcessId = tuple[int, float]
"""pid, and when it was created: pids are used again."""

SAME_S = 2.0
"""Two processes may think of the time of a third one's creation so differently, when the clock was set in between."""


def process_tree(pid: int) -> list[ProcessId]:
    """A process and all its descendants."""
    root = psutil.Process(pid)
    return [(process.pid, process.create_time()) for process in (root, *root.children(recursive=True))]


def kill_processes(processes: Iterable[ProcessId]) -> None:
    """SIGKILL, which ends stopped processes too. Those that are gone already are passed over."""
    for pid, created in processes:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if abs(psutil.Process(pid).create_time() - created) < SAME_S:
                os.kill(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """By SIGSTOP, or by a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False
