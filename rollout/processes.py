"""The processes of one replica on this machine, and their end."""

import contextlib
import os
import signal
from collections.abc import Iterable

import psutil

ProcessId = tuple[int, float]
"""pid, and when it was created: pids are used again."""


def process_tree(pid: int) -> list[ProcessId]:
    """A process and all its descendants."""
    root = psutil.Process(pid)
    return [(process.pid, process.create_time()) for process in (root, *root.children(recursive=True))]


def kill_processes(processes: Iterable[ProcessId]) -> None:
    """SIGKILL, which ends stopped processes too. Those that are gone already are passed over."""
    for pid, created in processes:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if psutil.Process(pid).create_time() == created:
                os.kill(pid, signal.SIGKILL)
