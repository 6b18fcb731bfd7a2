"""Runs a command of the shell, and ends all that it has started: a program of its own, which needs the standard library
only.

    python -I -S reaper.py CONTROL SCRIPT ARGUMENT...

The kernel gives a process whose parent has ended to its nearest ancestor that is a subreaper, which this process is.
So whatever the command starts stays below this process, also a daemon that has left its session and cleared its
environment. All of it is killed when the command ends, and when the descriptor CONTROL is closed at its other end: by
whoever started this, or because that has ended. The exit code is the command's.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections import defaultdict

PR_SET_CHILD_SUBREAPER = 36
"""The option of prctl(2) that makes a process the parent of its orphaned descendants."""
END_S = 5.0
"""The seconds that processes may take to end once they are killed."""
LOOKS_S = 0.01


def main(control: int, script: str, *arguments: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(control, False)
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to `wake`
    shell = os.fork()
    if shell == 0:
        _become_shell(script, *arguments)
    for stream in range(3):  # the command's own are to end with it
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    status = None
    while status is None:
        ready, _, _ = select.select([control, ended], [], [])
        if control in ready:
            break
        os.read(ended, 4096)
        status = _reaped(shell)
    _end_descendants(shell)
    _exit_as(status)


def _become_shell(script: str, *arguments: str) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
        signal.signal(number, signal.SIG_DFL)
    os.setsid()  # `kill 0` in the command is for the command
    try:
        os.execv("/bin/sh", ["sh", "-c", script, "sh", *arguments])
    except OSError as error:
        os.write(2, f"/bin/sh: {error}\n".encode())
        os._exit(126)


def _reaped(shell: int) -> int | None:
    """Take the ends of all processes that have ended. Return the status of the shell once it is among them."""
    status = None
    while True:
        try:
            pid, its_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == shell:
            status = its_status


def _end_descendants(shell: int) -> None:
    """Kill until no child is left: a process that is being killed may just have started another."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        for pid in _descendants() or [-shell]:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # ended, or of another user
                os.kill(pid, signal.SIGKILL)
        _reaped(shell)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        time.sleep(LOOKS_S)


def _descendants() -> list[int]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    stat = file.read()
            except OSError:  # it has ended
                continue
            children[int(stat.rpartition(b")")[2].split()[1])].append(int(name))
    pids = list(children[os.getpid()])
    for pid in pids:
        pids += children[pid]
    return pids


def _exit_as(status: int | None) -> None:
    """End as the command has ended."""
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
