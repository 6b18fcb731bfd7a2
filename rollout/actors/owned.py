"""Processes in which a run calls a user's code, so that it can be ended whatever it does: while it holds Python's
global lock (GIL), and with all that it has started."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing.context import SpawnProcess

from configs.serve import TOKEN_ENV
from rollout.actors.output import never_fail_to_print

PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that names the signal which the kernel sends when the parent dies. The parent is the thread
that has started the process."""


class OwnedProcess(SpawnProcess):
    """A process that leads a process group, which is killed as one, and that does not outlive its owner (on Linux)."""

    def run(self) -> None:
        os.setsid()
        os.environ.pop(TOKEN_ENV, None)  # a user's code may run what a model wrote, which needs no server of ours
        owner = multiprocessing.parent_process()
        if sys.platform == "linux":  # also while the code holds the GIL
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if owner is None or os.getppid() != owner.pid:  # it has died before that
            os._exit(1)
        never_fail_to_print()
        super().run()

    def terminate(self) -> None:
        """End the process at once, with what it has started in its group."""
        assert self.pid is not None
        if not kill_group(self.pid):
            self.kill()  # it does not lead a group yet


def kill_group(pid: int) -> bool:
    """Kill a process group, and return whether there was one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
        return True
    return False


def ending(exit_code: int) -> str:
    """Return how a process ended. Example: ending(-9) == "killed by SIGKILL"."""
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
