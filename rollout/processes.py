"""The processes of one replica on this machine, and their end."""

import contextlib
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
SAME_S = 2.0
"""Two processes may think of the time of a third one's creation so differently, when the clock was set in between."""


def process_tree(pid: int) -> list[ProcessId]:
    """A process and all its descendants."""
    root = psutil.Process(pid)
    return [(process.pid, process.create_time()) for process in (root, *root.children(recursive=True))]


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
    """From now on a process of its own sees to it that all that this one has started is killed when this one is gone,
    however that ended: vLLM's engine core does not notice, and would keep the GPU's memory for good."""
    subprocess.Popen(
        [sys.executable, "-m", "rollout.processes", json.dumps(process_tree(os.getpid()))],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is not for it
    )


def _guard(owner: ProcessId, descendants: Iterable[ProcessId]) -> None:
    while _is_there(owner):
        time.sleep(GUARD_INTERVAL_S)
    kill_processes(descendants)


def is_stopped(pid: int) -> bool:
    """By SIGSTOP, or by a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    _owner, *_descendants = json.loads(sys.argv[1])
    _guard(_owner, _descendants)
