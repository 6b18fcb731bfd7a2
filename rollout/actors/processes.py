"""A replica's processes on this machine, and how they are ended."""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import psutil

GUARD_INTERVAL_S = 1.0
INTERVALS_PER_SCAN = 5
"""Looking for new descendants reads all processes of the machine, so it is done less often."""
PASSES, PASS_S = 50, 0.1
"""The number of times that the guard looks for what is left once its owner is gone, and the seconds between."""


def process_tree(pid: int) -> list[psutil.Process]:
    """Return the process, if it is there, and all its descendants. They know their pids from those that are used
    again."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_processes(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL, which ends stopped processes too, to those that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def is_stopped(process: psutil.Process) -> bool:
    """Return whether SIGSTOP or a debugger stopped the process."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def end_descendants_with_this(folder: Path | None = None) -> None:
    """Start a guard process that kills everything this process starts once this process is gone, however it ended, and
    then removes `folder`. vLLM's engine core does not notice by itself, and would keep the GPU's memory for good; nor
    does what a reward or an environment has started.

    The guard may not know processes that were started in the last few seconds, unless they are in the session of one
    that it knows, as the children of a reward's process are. The same call again in this process does nothing.
    """
    _start_guard(os.getpid(), folder)


@cache  # by pid, too: a process that was forked needs a guard of its own
def _start_guard(owner: int, folder: Path | None) -> None:
    guard = [sys.executable, "-m", __name__, str(owner), *([] if folder is None else [str(folder)])]
    # Not a child of this process: Ray kills the children of an actor that it ends.
    subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", *guard],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # out of reach of a Ctrl-C
        check=True,
    )


def _guard(owner: int, folders: Iterable[str]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
        _end_descendants(psutil.Process(owner))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end_descendants(owner: psutil.Process) -> None:
    """Kill the descendants of the owner when it is gone."""
    descendants: set[psutil.Process] = set()
    for interval in itertools.count():
        if not _lives(owner):
            break
        if interval % INTERVALS_PER_SCAN == 0:
            descendants.update(process_tree(owner.pid)[1:])
            descendants = {process for process in descendants if process.is_running()}
        time.sleep(GUARD_INTERVAL_S)
    sessions = {process.pid for process in descendants}
    for _ in range(PASSES):  # a process that is being killed may just have started another
        kill_processes(descendants)
        descendants = _in_sessions(sessions)
        if not descendants:
            return
        time.sleep(PASS_S)


def _lives(process: psutil.Process) -> bool:
    """Return whether a process is there. One that has ended may stay as a zombie for as long as its parent likes."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _in_sessions(leaders: set[int]) -> set[psutil.Process]:
    """Return the processes in the sessions of these leaders, which may have ended before them."""
    members: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_other = process.pid != os.getpid()
            if is_other and os.getsid(process.pid) in leaders and process.status() != psutil.STATUS_ZOMBIE:
                members.add(process)
    return members


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2:])
