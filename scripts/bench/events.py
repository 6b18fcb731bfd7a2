"""The question: what do events add to the time of a step? Three minutes on two cores.

python -m scripts.bench.events [--repeats 7]

The real scheduler, agent worker, replicas and train loop run simulated engines in one process. The arms are `on`, with
`trainer.events=true` and a writer that writes, and `off`. `step_time_ratio` and `step_seconds` are measured in real
time; `cpu_ms_per_step`, the CPU milliseconds of all threads that events add to a step, on a virtual clock, where
nothing waits.
"""

import asyncio
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rollout.engines.virtual_clock import run_virtual
from scripts.bench.common import LogNormalLengths
from scripts.bench.harness import Figures, make_parser, show_figures, take_turns
from scripts.bench.simulated_job import Job, run_job_here
from scripts.observe.tables import write_json
from trainer.tracking.events.lines import event_files
from trainer.tracking.events.writer import EventWriter
from trainer.tracking.sinks import FailedWrites

MAX_STALENESS = 2


def main() -> None:
    repeats = make_parser(__doc__, repeats=7).parse_args().repeats
    job = Job(length_of=LogNormalLengths(mean=60, sigma=0.7, cap=300), num_steps=8, train_s=0.5)
    with TemporaryDirectory() as folder:
        figures = asyncio.run(measure(job, repeats, Path(folder)))
    show_figures(f"events: {job.num_trajectories} trajectories in {job.num_steps} steps", figures)
    write_json(figures)


async def measure(job: Job, repeats: int, folder: Path) -> Figures:
    """Return the figures of the last line. `folder` is empty, and takes the events."""

    async def in_real_time(is_on: bool, number: int) -> Figures:
        with written(folder / f"real-{number}", is_on=is_on) as writer:
            outcome = await run_job_here(job, MAX_STALENESS, write=writer and writer.put)
        return {"step_s": outcome.seconds / job.num_steps}

    def virtually(is_on: bool, number: int) -> Figures:
        began = time.process_time()
        with written(folder / f"virtual-{number}", is_on=is_on) as writer:
            run_virtual(run_job_here(job, MAX_STALENESS, write=writer and writer.put))
        return {"cpu_s": time.process_time() - began}

    arms = {"on": True, "off": False}
    real = await take_turns(in_real_time, arms, repeats)
    # In threads, because a virtual clock needs an event loop of its own.
    virtual = await take_turns(lambda *arm: asyncio.to_thread(virtually, *arm), arms, repeats)
    files = [path for _, path in event_files(folder / "virtual-0")]
    num_events = sum(path.read_bytes().count(b"\n") for path in files)
    cpu = zip(virtual.values("cpu_s", "on"), virtual.values("cpu_s", "off"), strict=True)
    return {
        "step_time_ratio": real.ratio("step_s", "on", over="off"),
        "step_seconds": real.median("step_s", "off"),
        "events_per_step": num_events / job.num_steps,
        "bytes_per_event": sum(path.stat().st_size for path in files) / num_events,
        "cpu_ms_per_step": 1e3 * median(on - off for on, off in cpu) / job.num_steps,
    }


def written(run_dir: Path, *, is_on: bool) -> AbstractContextManager[EventWriter | None]:
    """Write events into a new folder, or none."""
    if not is_on:
        return nullcontext()
    run_dir.mkdir()
    return EventWriter(run_dir=run_dir, failed=FailedWrites())


if __name__ == "__main__":
    main()
