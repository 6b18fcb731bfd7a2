"""Runs parts one after another, each in a process of its own, whose GPU memory is free when it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.bench.common import write_line
from scripts.bench.gpu.outcome import Outcome, Record, Setting, read_record
from scripts.bench.gpu.parts import Part

LAST_LINES = 15
END_S = 10.0
"""How long a process has between SIGTERM and SIGKILL."""


def run_parts(parts: Mapping[str, Part], setting: Setting, budget_s: float, command: Sequence[str]) -> list[Record]:
    """Runs what has no record of success yet, within the budget. `command` and a part's name run that part."""
    ends = time.monotonic() + budget_s
    setting.folder.mkdir(parents=True, exist_ok=True)
    records = []
    for name, part in parts.items():
        before = read_record(name, setting.folder)
        if before is not None and before.outcome is Outcome.done:
            write_line(f"{name}: done before, in {before.seconds:.0f} s")
            records.append(before)
            continue
        left_s = ends - time.monotonic()
        if left_s < part.deadline_s:
            write_line(
                f"{name}: left for another call, since it may take {part.deadline_s:.0f} s and {left_s:.0f} are left"
            )
            records.append(Record(part=name, outcome=Outcome.left))
            continue
        write_line(f"{name}: {part.what}, at most {part.deadline_s:.0f} s")
        record = run_part(name, part, setting, command)
        write_line(f"{name}: {record.outcome.value} after {record.seconds:.0f} s")
        records.append(record)
    return records


def run_part(name: str, part: Part, setting: Setting, command: Sequence[str]) -> Record:
    """Runs one part to its end or its deadline, and leaves its record and its log in the folder."""
    started = time.monotonic()
    lines: deque[str] = deque(maxlen=LAST_LINES)
    process = subprocess.Popen(
        [*command, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    reader = threading.Thread(target=_follow, args=(process, setting.folder / f"{name}.log", lines), daemon=True)
    reader.start()
    late = False
    try:
        process.wait(part.deadline_s)
    except subprocess.TimeoutExpired:
        late = True
    finally:  # also when this process is interrupted
        _end(process)
    reader.join(END_S)
    seconds = time.monotonic() - started
    record = read_record(name, setting.folder)
    if process.returncode == 0 and record is not None and record.outcome is Outcome.done:
        return record
    why = [f"not over after {part.deadline_s:.0f} s"] if late else [f"exit code {process.returncode}"]
    record = Record(part=name, outcome=Outcome.failed, seconds=round(seconds, 1), error=[*lines, *why])
    record.write(setting.folder)
    return record


def run_here(name: str, part: Part, setting: Setting) -> None:
    """What the part's own process does."""
    started = time.monotonic()
    figures = part.run(setting)
    seconds = round(time.monotonic() - started, 1)
    Record(part=name, outcome=Outcome.done, seconds=seconds, figures=dict(figures)).write(setting.folder)


def part_command(setting: Setting) -> list[str]:
    """To which a part's name is appended."""
    dry_run = ["--dry-run"] if setting.dry_run else []
    return [sys.executable, "-m", "scripts.bench.gpu", "--folder", str(setting.folder), *dry_run, "--here"]


def _follow(process: "subprocess.Popen[str]", log: Path, lines: "deque[str]") -> None:
    """Shows what the process writes, and keeps it."""
    assert process.stdout is not None
    with log.open("w") as file:
        for line in process.stdout:
            file.write(line)
            lines.append(line.rstrip())
            write_line(f"    {line.rstrip()}")


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends the process and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                continue
