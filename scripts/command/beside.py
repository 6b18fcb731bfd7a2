"""Commands that look at a run, in processes of their own: the page beside it, and the curve and the audit at its end.

They are never imported here, so a checkout without them trains as well, and nothing that they do can break a run.
"""

import importlib.util
import json
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PAGE_START_S = 30.0
"""The longest wait of a run for the address of its page."""
PAGE_END_S = 5.0
PIECE_BYTES = 2**16
LOOK_S = 3600.0
"""The deadline of a command that reads the records of a run: those of a long run are many gigabytes."""


class CommandFailedError(RuntimeError):
    """A command that looks at a run failed. The message says why."""


class NotInCheckoutError(CommandFailedError):
    """A command that looks at runs was deleted from this checkout, which trains without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """The answer of `python -m scripts.audit RUN`."""

    report: dict[str, Any]
    """The report as it is written into summary.json."""
    sentence: str
    """The report in one line."""

    @property
    def is_clean(self) -> bool:
        return not self.report["findings"]


def audit(run_dir: Path, summary: dict[str, Any]) -> AuditResult:
    """Audit the records of a run that has ended, without its checkpoints, which it has just written. Raises
    CommandFailedError."""
    done = _look_at("audit", run_dir, "--records", "--summary", text=json.dumps(summary))
    if not done.stdout:  # with findings too it exits with 1, but there is a report
        raise CommandFailedError(_last_line(done.stderr))
    return AuditResult(report=json.loads(done.stdout), sentence=_last_line(done.stderr))


def draw_curve(run_dir: Path) -> None:
    """Draw curve.png in the run folder. Raises CommandFailedError."""
    done = _look_at("plot_curve", run_dir)
    if done.returncode:
        raise CommandFailedError(_last_line(done.stderr))


@contextmanager
def dashboard_beside(is_wanted: bool, run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of the run while the block runs. `say` gets its address, or why there is none: the run goes on.

    The process reads its standard input, whose end tells it that the run is gone, even one that was killed.
    """
    if not is_wanted:
        yield
        return
    command = [sys.executable, "-m", "scripts.dashboard", f"run={run_dir}", "--with-parent"]
    pipe = subprocess.PIPE
    try:
        # A session of its own, because Ctrl-C in the terminal is meant for the run.
        process = subprocess.Popen(command, start_new_session=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
    except OSError as error:
        say(f"dashboard=true: it cannot be started: {error}")
        yield
        return
    assert process.stdin is not None and process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], PAGE_START_S)
        line = process.stdout.readline().decode(errors="replace").strip() if ready else ""
        say(line or f"dashboard=true: no address within {PAGE_START_S:g} s; try `make dashboard`")
        threading.Thread(target=_read_to_its_end, args=(process.stdout,), name="dashboard", daemon=True).start()
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(PAGE_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read_to_its_end(stream: IO[bytes]) -> None:
    """Drop what a page says after its address: a pipe that nobody reads fills up, and would hold the page."""
    with stream:
        while stream.read(PIECE_BYTES):
            pass


def _look_at(name: str, run_dir: Path, *options: str, text: str = "") -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec(f"scripts.{name}") is None:
        raise NotInCheckoutError(f"this checkout has no scripts/{name}.py")
    command = [sys.executable, "-m", f"scripts.{name}", str(run_dir), *options]
    try:
        return subprocess.run(
            command, capture_output=True, input=text, text=True, errors="replace", timeout=LOOK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailedError(str(error)) from error


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2] or "it said nothing"
