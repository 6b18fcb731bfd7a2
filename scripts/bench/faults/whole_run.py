"""A run of scripts.train on real engines, watched and broken from outside."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from configs.runtime.environment import REPO_ROOT
from scripts.bench.faults.report import Row
from trainer.tracking.audit import audit

MAX_STALENESS = 2
OVERRIDES = (
    "model=tiny",
    "plain_console=true",
    "trainer.eval_every=0",
    "trainer.prompts_per_step=8",
    "model.warmup_steps=50",
    "data.num_val=8",
    "checkpoint.every=5",
    "rollout.num_replicas=2",
    "rollout.replica_timeout_s=10",
    f"rollout.max_staleness={MAX_STALENESS}",
    "wandb.mode=disabled",
)
DEADLINE_S = 300.0
END_DEADLINE_S = 60.0
THROTTLE_PERIOD_S = 0.1


class WholeRun:
    """A process of scripts.train, which resumes from the folder's newest checkpoint if it has one. Its output is
    appended to console.txt.

    Example:
        run = WholeRun(run_dir, steps=200)
        run.wait_for("step 5", lambda: run.steps >= 5)
        run.find("VLLM::EngineCore").kill()
        run.finish(row)
    """

    def __init__(self, run_dir: Path, steps: int, overrides: Sequence[str] = ()):
        """`steps`: trainer.total_steps."""
        self.run_dir, self._total_steps = run_dir, steps
        self._console = run_dir / "console.txt"
        run_dir.mkdir(parents=True, exist_ok=True)
        own = (f"hydra.run.dir={run_dir}", "resume=auto", f"trainer.total_steps={steps}")
        command = [sys.executable, "-m", "scripts.train", *own, *OVERRIDES, *overrides]
        with self._console.open("ab") as output:
            self._begin = output.tell()
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd=REPO_ROOT)

    def wait_for(self, what: str, holds: Callable[[], bool], poll_s: float = 0.1) -> bool:
        """Wait until `holds()`. Returns False when the run ended first. Raises TimeoutError past DEADLINE_S."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"{what} did not come within {DEADLINE_S:g} s; see {self.run_dir}")
            time.sleep(poll_s)
        return True

    def kill(self) -> float:
        """Send SIGKILL to the driver; all other processes end by themselves. Returns its time.time()."""
        self.process.send_signal(signal.SIGKILL)
        killed_at = time.time()
        self.process.wait(END_DEADLINE_S)
        return killed_at

    @property
    def steps(self) -> int:
        """Optimizer steps that this process has taken."""
        return sum(line.startswith("step ") for line in self._lines())

    def said(self, what: str) -> bool:
        return any(what in line for line in self._lines())

    def _lines(self) -> list[str]:
        """The complete lines of this process."""
        with self._console.open("rb") as file:
            file.seek(self._begin)
            return [line.decode() for line in file if line.endswith(b"\n")]

    def find(self, title: str) -> psutil.Process:
        """Return a process of the run whose title begins with `title`."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it ended meanwhile
                if " ".join(child.cmdline()).startswith(title):
                    return child
        raise RuntimeError(f"the run of {self.run_dir} has no process {title}")

    def finish(self, row: Row) -> None:
        """Wait for the end of the run, and add what the faults have cost to the row.

        Raises:
            RuntimeError: the run failed, or trained a token of a newer version or beyond rollout.max_staleness.
        """
        try:
            self.wait_for("the end", lambda: False)
        except TimeoutError:
            row.unbounded_waits += 1
            return
        if self.process.returncode != 0:
            raise RuntimeError(f"the run ended with {self.process.returncode}; see {self._console}")
        found = audit(self.run_dir)
        if found.newer_versions or found.max_staleness > MAX_STALENESS:
            raise RuntimeError(f"{self.run_dir} has broken rollout.max_staleness={MAX_STALENESS}: {found}")
        row.lost += found.lost + found.missing_steps + self._total_steps - found.steps
        row.twice += found.twice
        row.descending_versions += found.descending_versions
        row.restarted += int(json.loads((self.run_dir / "summary.json").read_text())["restarted"])


@contextmanager
def throttled(process: psutil.Process, share: float) -> Iterator[None]:
    """Let the process run for a `share` of the time, until it ends or the block does. It is left running."""
    is_over = threading.Event()

    def stop_and_go() -> None:
        with suppress(psutil.NoSuchProcess):
            while not is_over.is_set():
                try:
                    process.send_signal(signal.SIGSTOP)
                    is_over.wait((1 - share) * THROTTLE_PERIOD_S)
                finally:
                    process.send_signal(signal.SIGCONT)
                is_over.wait(share * THROTTLE_PERIOD_S)

    thread = threading.Thread(target=stop_and_go, name="throttle")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
