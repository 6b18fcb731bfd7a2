"""Whatever a process starts ends with it, however it ends."""

import signal
import subprocess
import sys
import time

import psutil

from rollout.replica.processes import GUARD_INTERVAL_S, INTERVALS_PER_SCAN
from tests.support.whole_runs import survivors

OWNER = """
import subprocess, sys, time
from rollout.replica.processes import end_descendants_with_this
end_descendants_with_this()
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn])
subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])
sys.stdin.read(1)
"""


def start() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, text=True)


def test_descendants_and_their_guard_end_with_their_owner() -> None:
    """They were started after the guard, one of them by another."""
    owners = [start() for _ in range(3)]
    time.sleep((INTERVALS_PER_SCAN + 2) * GUARD_INTERVAL_S)
    children = [psutil.Process(owner.pid).children(recursive=True) for owner in owners]
    try:
        assert [len(of_owner) for of_owner in children] == [5] * 3, "the guard, two of the owner, two of the shell"
        killed, terminated, returning = owners
        killed.kill()
        terminated.send_signal(signal.SIGTERM)
        assert returning.stdin is not None
        returning.stdin.close()
        for owner, of_owner in zip(owners, children, strict=True):
            owner.wait(30)
            assert survivors(of_owner) == []
    finally:
        for process in [*owners, *sum(children, [])]:
            if isinstance(process, subprocess.Popen) or process.is_running():
                process.kill()
        for owner in owners:
            owner.wait()
            if owner.stdin is not None:
                owner.stdin.close()
