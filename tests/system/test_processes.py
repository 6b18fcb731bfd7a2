"""Whatever a process started ends with it, however it ends."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

DEADLINE_S = 30
OWNER = """
import subprocess, sys, time
from rollout.processes import end_descendants_with_this
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn])
end_descendants_with_this()
sys.stdout.write("started\\n")
sys.stdout.flush()
sys.stdin.read(1)
"""


def until_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while left := [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["killed", "terminated", "returned"])
def test_descendants_and_their_guard_end_with_their_owner(how: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None and owner.stdout is not None
    assert owner.stdout.readline() == "started\n"
    children = psutil.Process(owner.pid).children(recursive=True)
    try:
        assert len(children) == 2
        time.sleep(1.5)
        assert all(child.is_running() for child in children), "while it is there, they are"
        if how == "returned":
            owner.stdin.close()
        else:
            owner.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
        owner.wait(DEADLINE_S)
        until_gone(children)
    finally:
        for child in children:
            if child.is_running():
                child.kill()
        owner.kill()
        owner.wait()
        owner.stdout.close()
