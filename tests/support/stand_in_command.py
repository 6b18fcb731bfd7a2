"""Stands in for the process of a command that Python has started: `COMMAND FILE ARGUMENTS`, as scripts.api.child.

interrupted: sends Ctrl-C to its parent, waits for it, and ends as a stopped command does.
killed: ends without a word.
orphan FILE: waits for the end of its standard input, and then makes FILE.
"""

import os
import pickle
import signal
import sys
from pathlib import Path

from scripts.api.process import Outcome


def main() -> None:
    command, file, *arguments = sys.argv[1:]
    if command == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if command == "orphan":
        sys.stdin.read()
        Path(arguments[0]).touch()
    if command == "interrupted":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        sys.stdout.write("ünder way\n")
        sys.stdout.flush()
        os.kill(os.getppid(), signal.SIGINT)
        signal.sigtimedwait([signal.SIGINT], 60)
        sys.stdout.write("stopped")
        sys.stderr.write("told")
    Path(file).write_bytes(pickle.dumps(Outcome(exit_code=130 if command == "interrupted" else 0)))


if __name__ == "__main__":
    main()
