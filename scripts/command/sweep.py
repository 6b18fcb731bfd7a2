"""The outcome of the jobs of a sweep (`-m`): a file in each job's folder, and a table over all of them.

Files, because a launcher of Hydra may run jobs in other processes and on other machines.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.tracking.sinks import write_atomically

JOB_FILE, SWEEP_FILE = "job.json", "sweep.json"
COLUMNS = ("job", "overrides", "accuracy", "seconds", "status")
FINISHED, UNPROVEN, FAILED, STOPPED, MISSING = "finished", "unproven", "failed", "stopped", "not run"
"""`UNPROVEN`: trained to its end, with findings of the audit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """Example: SweepJob(number=0, overrides=("trainer.lr=1e-4",), status="finished", accuracy=0.97, seconds=61.2)"""

    number: int
    overrides: tuple[str, ...]
    status: str
    accuracy: float | None = None
    seconds: float | None = None
    error: str = ""

    def save(self, folder: Path) -> None:
        write_atomically(folder / JOB_FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())


def remove_earlier(sweep_dir: Path) -> None:
    """Remove what the jobs of an earlier sweep in the same folder left."""
    for path in sweep_dir.rglob(JOB_FILE):
        path.unlink()


def read_jobs(sweep_dir: Path, planned: Sequence[Sequence[str]]) -> list[SweepJob]:
    """Every job that left its file, in order, and those of `planned` (the overrides of each) that left none."""
    read = [json.loads(path.read_text(encoding="utf-8")) for path in sweep_dir.rglob(JOB_FILE)]
    jobs = {job["number"]: SweepJob(**job | {"overrides": tuple(job["overrides"])}) for job in read}
    for number, overrides in enumerate(planned):
        jobs.setdefault(number, SweepJob(number=number, overrides=tuple(overrides), status=MISSING))
    return [jobs[number] for number in sorted(jobs)]


def write_sweep(sweep_dir: Path, jobs: Sequence[SweepJob]) -> Path:
    file = sweep_dir / SWEEP_FILE
    write_atomically(file, (json.dumps([asdict(job) for job in jobs], indent=2) + "\n").encode())
    return file


def sweep_table(jobs: Sequence[SweepJob]) -> str:
    """One line per job, with the overrides in which the jobs differ, and under it the error of each that failed."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    cells = [COLUMNS, *(_cells(job, common) for job in jobs)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    for index, job in reversed(list(enumerate(jobs, 1))):
        if job.error:
            rows.insert(index + 1, f"{' ' * widths[0]}  {job.error.splitlines()[0]}")
    return "\n".join(rows)


def _cells(job: SweepJob, common: set[str]) -> tuple[str, ...]:
    own = " ".join(override for override in job.overrides if override not in common)
    accuracy = "-" if job.accuracy is None else f"{job.accuracy:.4f}"
    return str(job.number), own or "-", accuracy, "-" if job.seconds is None else f"{job.seconds:.0f}", job.status
