"""Write the timeline of a run as a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

slipstream timeline RUN_DIR [--steps A:B] [-o trace.json.gz]

    --steps   draw these steps only, both included: 40:60, 40:, :60 or 40
    -o        the file to write; a name that ends in .gz is compressed [RUN_DIR/trace.json.gz]

Any folder with events will do, of a run that is live, has ended, was killed or was copied. The events are read one by
one, and only the groups under way are held in memory.
"""

import argparse
import gzip
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from scripts.observe.files import RunError
from scripts.observe.run import Run
from scripts.observe.trace import Record, Trace
from scripts.observe.view import RunView
from trainer.tracking.events.lines import EVENTS_FILE

TRACE_FILE = "trace.json.gz"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--steps", default=":", help="first and last step, such as 40:60 [all]")
    parser.add_argument("-o", dest="output", type=Path, help=f"[RUN_DIR/{TRACE_FILE}]")
    options = parser.parse_args(arguments)
    output = options.output or options.run_dir / TRACE_FILE
    try:
        count = write_trace(Run.open(options.run_dir), output, *parse_steps(options.steps))
    except (RunError, OSError) as error:
        sys.exit(f"timeline error: {error}")
    sys.stdout.write(f"{count} records in {output}: open it at https://ui.perfetto.dev\n")


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """Return the first and the last step; None leaves a side open. Raises RunError."""
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text)
    if match is None or not text:
        raise RunError(f"--steps {text}: must be like 40:60, 40:, :60 or 40")
    first, colon, last = match.groups()
    last = last if colon else first
    if first and last and int(last) < int(first):
        raise RunError(f"--steps {text}: the last step comes before the first")
    return int(first) if first else None, int(last) if last else None


def write_trace(run: Run, output: Path, first: int | None = None, last: int | None = None) -> int:
    """Write the trace of these steps and return its number of records. Raises RunError and OSError."""
    begin, since, until = window(run, first, last)
    trace, count = Trace(begin, since, until), 0
    encode = msgspec.json.Encoder().encode
    with gzip.open(output, "wb", compresslevel=5) if output.name.endswith(".gz") else output.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":{"start":%.6f},"traceEvents":[' % begin)
        for record in _records(run, trace):
            file.write((b",\n" if count else b"\n") + encode(record))
            count += 1
        file.write(b"\n]}\n")
    return count


def window(run: Run, first: int | None, last: int | None) -> tuple[float, float, float]:
    """Return the time of the first event, and from when to when the steps took. Raises RunError."""
    begin, view = math.inf, RunView()
    for stamped in run.valid_events():
        begin = min(begin, stamped.time)
        if not stamped.event.is_frequent:
            view.add(stamped)
    if begin == math.inf:
        raise RunError(f"{run.folder}: no {EVENTS_FILE} there, or no event in it")
    starts = {number: step.start for number, step in view.steps.items() if step.start is not None}
    for step in (first, last):
        if step is not None and step not in starts:
            there = f"{min(starts)} to {max(starts)} are there" if starts else "there is none"
            raise RunError(f"--steps: there is no step {step} in {run.folder}; {there}")
    recorded = None if last is None else view.steps[last].recorded
    return begin, -math.inf if first is None else starts[first], math.inf if recorded is None else recorded


def _records(run: Run, trace: Trace) -> Iterator[Record]:
    for stamped in run.valid_events():
        yield from trace.add(stamped)
    yield from trace.close()


if __name__ == "__main__":
    main()
