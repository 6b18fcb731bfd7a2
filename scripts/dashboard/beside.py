"""Starts the page beside a run, in a process of its own that ends with the run, however the run ends."""

import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 30.0
"""How long a run waits for the address."""
END_S = 5.0


@contextmanager
def dashboard_beside(is_wanted: bool, run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """The page of `run_dir` while the block runs; `say` gets its address, or why there is none: the run goes on.

    The process reads its standard input, whose end tells it that the run is gone, even one that was killed.
    """
    if not is_wanted:
        yield
        return
    command = [sys.executable, "-m", "scripts.dashboard", f"run={run_dir}", "--with-parent"]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(  # in a session of its own: Ctrl-C is the run's
            command, start_new_session=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
        )
    except OSError as error:
        say(f"dashboard=true: it cannot be started: {error}")
        yield
        return
    assert process.stdin is not None and process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline().decode(errors="replace").strip() if ready else ""
        say(line or f"dashboard=true: no address within {START_S:g} s; try `make dashboard`")
        yield
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
