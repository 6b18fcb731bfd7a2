"""A command in a process of its own, started from Python.

A script or notebook lives on whatever becomes of the run: Ray ends the process of a run when it loses its object store,
a run takes over signals and logging, and needs an event loop, of which a notebook has one already. What runs there is
the command itself (`scripts.api.child`).
"""

import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from rollout.actors.owned import ending, kill_group
from rollout.actors.packed import CarriedError
from scripts.api.functions import python_path

CHILD = "scripts.api.child"
"""The module of the process."""
STOP_S = 180.0
"""The longest time that a stopped command gets to end what it has started. Then it is killed."""
LOOK_S = 0.1
PIECE_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a command, as its process tells it."""

    exit_code: int
    run_dir: Path | None = None
    """None where the command line was refused."""
    accuracy: float | None = None
    error: str = ""
    carried: CarriedError | None = None
    """The error itself."""


class CommandProcess:
    """A running command. Its output goes to `sys.stdout` and `sys.stderr` of this process, also where these are a
    notebook's.

    Example:
        process = CommandProcess("train", ["recipe=arithmetic"])
        outcome = process.wait()
    """

    def __init__(self, command: str, arguments: Sequence[str]):
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-")
        self._file = Path(self._folder.name) / "outcome"
        is_direct = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # A session of its own: Ctrl-C in the terminal reaches this process, which passes it on once. The child watches
        # its standard input, whose end tells it that this process is gone. -P: the current folder may have packages of
        # the names of ours.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", CHILD, command, str(self._file), *arguments],
            stdin=subprocess.PIPE,
            stdout=None if is_direct else subprocess.PIPE,
            stderr=None if is_direct else subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        self._output = _Output(self._process)
        self._reader: threading.Thread | None = None
        """Passes the output on in place of `look`."""

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def look(self) -> None:
        """Pass the output on, and wait for more for a moment."""
        if self._reader is None:
            self._output.pass_on(LOOK_S)
        else:
            self._reader.join(LOOK_S)

    def pass_on_from_here(self) -> None:
        """Pass the output on from a thread: who has a server does other things, and a command whose pipe is full stands
        still."""
        self._reader = threading.Thread(target=self._pass_all_on, name="output", daemon=True)
        self._reader.start()

    def _pass_all_on(self) -> None:
        while self.is_alive:
            self._output.pass_on(LOOK_S)
        self._output.pass_on(0)

    def wait(self) -> Outcome:
        """Wait for the end, and return it. Ctrl-C stops the command as it does in a terminal, and is raised again once
        the command has ended. So is any other exception that comes up here, such as that of an alarm."""
        try:
            return self._waited()
        except BaseException:
            self.stop()
            raise

    def _waited(self) -> Outcome:
        stopped: KeyboardInterrupt | None = None
        stop_at = float("inf")
        while self.is_alive:
            try:
                self.look()
                if time.monotonic() > stop_at:
                    kill_group(self._process.pid)
            except KeyboardInterrupt as error:
                stopped, stop_at = error, min(stop_at, time.monotonic() + STOP_S)
                self._process.send_signal(signal.SIGINT)
        self._output.pass_on(0)
        outcome = self._outcome()
        if stopped is not None:
            raise stopped
        return outcome

    def stop(self) -> None:
        """Stop the command, and wait for its end. One that has ended is left alone."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)
            stop_at = time.monotonic() + STOP_S
            while self.is_alive and time.monotonic() < stop_at:
                self.look()
            if self.is_alive:
                kill_group(self._process.pid)
            self._process.wait(STOP_S)
        self._outcome()  # closes what is open; of one that has ended already, there is nothing left to close

    def _outcome(self) -> Outcome:
        code = self._process.returncode
        if self._reader is not None:
            self._reader.join(STOP_S)
        try:
            return pickle.loads(self._file.read_bytes())
        except FileNotFoundError:
            return Outcome(exit_code=code, error=f"the process of the command ended: {ending(code)}")
        finally:
            self._output.close()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._folder.cleanup()


class _Output:
    """The pipes of a process, whose text is written to the streams of this one. Nothing, where it inherits them."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process
        self._pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
        self._selector = selectors.DefaultSelector()
        decoder = getincrementaldecoder("utf-8")
        for pipe in self._pipes:
            target = sys.stdout if pipe is process.stdout else sys.stderr
            self._selector.register(pipe, selectors.EVENT_READ, (target, decoder("backslashreplace")))

    def pass_on(self, wait_s: float) -> None:
        """Write what is there, waiting for some for at most `wait_s`. What the process has left behind may hold the
        pipes open after its end."""
        if not self._selector.get_map():
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                return
            return
        while ready := self._selector.select(wait_s):
            for key, _ in ready:
                self._write(key.fileobj, *key.data)  # pyright: ignore[reportArgumentType]
            wait_s = 0

    def _write(self, pipe: IO[bytes], target: TextIO, decoder: IncrementalDecoder) -> None:
        piece = os.read(pipe.fileno(), PIECE_BYTES)
        if not target.closed:  # a cell's stream may be: what nobody reads is dropped, as the command waits for its pipe
            target.write(decoder.decode(piece, final=not piece))
            target.flush()
        if not piece:
            self._selector.unregister(pipe)

    def close(self) -> None:
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()
