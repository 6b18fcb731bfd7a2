"""Stands in for the process of a command that Python has started: `COMMAND FILE ARGUMENTS`, as scripts.api.child.

interrupted: sends Ctrl-C to its parent, waits for it, and ends as a stopped command does.
killed: ends without a word.
endless: ends when it is told to.
serve ... hydra.run.dir=FOLDER: writes an address, then far more than a pipe holds, and then makes FOLDER/written.
orphan FILE: waits for the end of its standard input, and then makes FILE.
"""

import os
import pickle
import signal
import sys
import time
from pathlib import Path

from configs.serve import ADDRESS_FILE
from scripts.api.process import Outcome


def main() -> None:
    command, file, *arguments = sys.argv[1:]
    if command == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if command == "orphan":
        sys.stdin.read()
        Path(arguments[0]).touch()
    if command == "endless":
        time.sleep(300)
    if command == "serve":
        run_dir = Path(arguments[-1].partition("=")[2].strip('"'))
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / ADDRESS_FILE).write_text("http://127.0.0.1:1")
        time.sleep(0.5)
        sys.stdout.write("x" * 2**20)
        sys.stdout.flush()
        (run_dir / "written").touch()
        time.sleep(300)
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
