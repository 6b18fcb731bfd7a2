"""What events cost: the time of a step of a simulated job, with and without them.

python -m scripts.bench.events [--repeats 7] [--steps 8] [--staleness 2]

The real scheduler, agent worker, replicas and train loop run simulated engines in one process, once in real time and
once on a virtual clock, by turns with `trainer.events=true` (and a writer that writes) and without. In a real run the
work is spread over the driver, agent workers and replicas.

The last line of the output is JSON:

    step_time_ratio    seconds of a step with events over without, in real time: median of neighbouring runs
    step_seconds       of a step without events, in real time
    events_per_step    lines in events.jsonl, and bytes_per_event of them
    cpu_ms_per_step    CPU milliseconds of all threads that events add to a step, on the virtual clock, where nothing
                       waits: the median of neighbouring runs
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from scripts.bench.asynchrony.limits import Job
from scripts.bench.asynchrony.simulated import run_job_here
from scripts.bench.common import LogNormalLengths, interleaved, median_ratio, show_table, write_json
from scripts.bench.virtual_clock import run_virtual
from trainer.tracking.events.lines import event_files
from trainer.tracking.events.writer import EventWriter
from trainer.tracking.sinks import FailedWrites


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=2)
    options = parser.parse_args()
    lengths = LogNormalLengths(mean=60, sigma=0.7, cap=300)
    job = Job(length_of=lengths, num_steps=options.steps, train_s=0.5)
    with TemporaryDirectory() as folder:
        figures = asyncio.run(bench(job, options.staleness, options.repeats, Path(folder)))
    write_json(figures)


async def bench(job: Job, staleness: int, repeats: int, folder: Path) -> dict[str, float]:
    """`folder`: empty, for events."""
    real = {name: partial(_seconds, job, staleness, path) for name, path in _arms(folder / "real").items()}
    virtual = {name: partial(_cpu_s, job, staleness, path) for name, path in _arms(folder / "virtual").items()}
    seconds, cpu = await interleaved(real, repeats), await interleaved(virtual, repeats)
    files = event_files(folder / "virtual" / "0")
    num_bytes = sum(path.stat().st_size for _, path in files)
    num_events = sum(path.read_bytes().count(b"\n") for _, path in files)
    added = [on - off for on, off in zip(cpu["on"], cpu["off"], strict=True)]
    figures = {
        "step_time_ratio": median_ratio(seconds["on"], seconds["off"]),
        "step_seconds": median(seconds["off"]) / job.num_steps,
        "events_per_step": num_events / job.num_steps,
        "bytes_per_event": num_bytes / num_events,
        "cpu_ms_per_step": 1e3 * median(added) / job.num_steps,
    }
    rows = [[name, f"{value:.4g}"] for name, value in figures.items()]
    show_table(f"events: {job.num_trajectories} trajectories in {job.num_steps} steps", ["figure", "value"], rows)
    return figures


def _arms(folder: Path) -> dict[str, Path | None]:
    return {"on": folder, "off": None}


async def _seconds(job: Job, staleness: int, folder: Path | None, repetition: int) -> float:
    """Of the whole job, in real time."""
    return await _with_events(folder, repetition, partial(_run, job, staleness))


async def _run(job: Job, staleness: int, writer: EventWriter | None) -> float:
    outcome = await run_job_here(job, staleness, write=None if writer is None else writer.put)
    return outcome.seconds


async def _cpu_s(job: Job, staleness: int, folder: Path | None, repetition: int) -> float:
    """CPU seconds of the whole job on a virtual clock, the writer's included."""
    started = time.process_time()

    def run() -> None:
        async def here(writer: EventWriter | None) -> float:
            return await asyncio.to_thread(lambda: run_virtual(_run(job, staleness, writer)))

        asyncio.run(_with_events(folder, repetition, here))

    await asyncio.to_thread(run)
    return time.process_time() - started


async def _with_events(
    folder: Path | None, repetition: int, run: Callable[[EventWriter | None], Awaitable[float]]
) -> float:
    if folder is None:
        return await run(None)
    run_dir = folder / str(repetition)
    run_dir.mkdir(parents=True)
    with EventWriter(run_dir=run_dir, max_mb=2048, failed=FailedWrites()) as writer:
        return await run(writer)


if __name__ == "__main__":
    main()
