"""Writes the timeline of a run as a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

python -m scripts.timeline RUN_DIR [--steps A:B] [-o trace.json.gz]

    --steps   of these steps only, both included: 40:60, 40:, :60 or 40
    -o        where to; a name that ends in .gz is compressed [RUN_DIR/trace.json.gz]

Any folder with events will do: of a run that goes on, has ended, was killed or was copied. It reads the events twice
and holds none of them in memory.
"""

import argparse
import gzip
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from trainer.tracking.events.kinds import StepPartStarted, StepRecorded
from trainer.tracking.events.lines import EVENTS_FILE
from trainer.tracking.events.reader import still_valid
from trainer.tracking.events.trace import Trace

TRACE_FILE = "trace.json.gz"


class TimelineError(ValueError):
    """The message says what cannot be drawn."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--steps", default=":", help="first and last step, such as 40:60 [all]")
    parser.add_argument("-o", dest="output", type=Path, help=f"[RUN_DIR/{TRACE_FILE}]")
    options = parser.parse_args(arguments)
    output = options.output or options.run_dir / TRACE_FILE
    try:
        count = write_trace(options.run_dir, output, *parse_steps(options.steps))
    except (TimelineError, OSError) as error:
        sys.exit(f"timeline error: {error}")
    sys.stdout.write(f"{count} records in {output}: open it at https://ui.perfetto.dev\n")


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """First and last step; None leaves a side open. Raises TimelineError."""
    found = re.fullmatch(r"(\d*)(:?)(\d*)", text)
    if found is None or not text:
        raise TimelineError(f"--steps {text}: must be like 40:60, 40:, :60 or 40")
    first, colon, last = found.groups()
    last = last if colon else first
    if first and last and int(last) < int(first):
        raise TimelineError(f"--steps {text}: the last step comes before the first")
    return int(first) if first else None, int(last) if last else None


def write_trace(run_dir: Path, output: Path, first: int | None = None, last: int | None = None) -> int:
    """Returns the number of records. Raises TimelineError and OSError."""
    begin, since, until = window(run_dir, first, last)
    trace, count = Trace(begin, since, until), 0
    encode = msgspec.json.Encoder().encode
    with _opened(output) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":{"start":%.6f},"traceEvents":[' % begin)
        for record in _records(run_dir, trace):
            file.write((b",\n" if count else b"\n") + encode(record))
            count += 1
        file.write(b"\n]}\n")
    return count


def window(run_dir: Path, first: int | None, last: int | None) -> tuple[float, float, float]:
    """The time of the first event, and from when to when the steps took. Raises TimelineError."""
    begin = None
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    for stamped in still_valid(run_dir):
        begin = stamped.time if begin is None else min(begin, stamped.time)
        if isinstance(event := stamped.event, StepPartStarted):
            began.setdefault(event.global_steps, stamped.time)
        elif isinstance(event, StepRecorded):
            ended[event.global_steps] = stamped.time
    if begin is None:
        raise TimelineError(f"{run_dir}: no {EVENTS_FILE} there, or no event in it")
    for step in (first, last):
        if step is not None and step not in began:
            there = f"{min(began)} to {max(began)} are there" if began else "there is none"
            raise TimelineError(f"--steps: there is no step {step} in {run_dir}; {there}")
    since = float("-inf") if first is None else began[first]
    until = float("inf") if last is None else ended.get(last, float("inf"))
    return begin, since, until


def _records(run_dir: Path, trace: Trace) -> Iterator[dict]:
    for stamped in still_valid(run_dir):
        yield from trace.add(stamped)
    yield from trace.close()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    if path.name.endswith(".gz"):
        with gzip.open(path, "wb", compresslevel=5) as file:
            yield file
    else:
        with path.open("wb") as file:
            yield file


if __name__ == "__main__":
    main()
