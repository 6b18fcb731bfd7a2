"""How fast the page is for a long run of large steps: `python -m tests.support.large_run FOLDER [--steps 2000]`.

Makes the folder of a run of 2,000 steps of 4,000 trajectories, unless it is there: the first `--detailed` steps are
simulated, with all their events; the files of the others are those of the last of these, and their events are only
those that a run keeps of old steps. Then it asks for what the screens ask for, each first when nothing of it has been
read before, and loads the page in Chromium.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout.events.event import Event, OfStep, Stamped
from scripts.bench.common import LogNormalLengths, peak_host_bytes
from scripts.dashboard.pulse import PULSE_KEYS
from scripts.dashboard.routes import Routes
from scripts.observe.events import EventReader
from scripts.observe.tables import show_table
from tests.support.browser import opened_browser
from tests.support.dashboards import JOB, simulated_run
from tests.support.happenings import write
from tests.support.page import first_paint, served
from trainer.tracking.sinks import METRICS_FILE
from trainer.tracking.trajectories import TRAJECTORIES


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.large_run", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the run")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=500, help="of a step, each with 8 trajectories")
    parser.add_argument("--detailed", type=int, default=12, help="steps with all their events")
    given = parser.parse_args(words)
    run_dir = given.folder / "run"  # beside it may be no others, which the page would list
    if not run_dir.exists():
        make(run_dir, given.steps, given.prompts, given.detailed)
    before = peak_mb()
    rows = measured(run_dir, given.detailed)
    show_table(f"{run_dir}: {given.steps} steps", ["asked for", "ms", "of CPU", "again", "of CPU"], rows)
    sys.stdout.write(f"memory: {peak_mb() - before:.0f} MB more than before\n")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        served([run_dir]) as address,
        opened_browser(Path(profile)) as tab,
    ):
        for _ in range(3):
            paint, shown = first_paint(tab, address)
            sys.stdout.write(f"first paint {paint:.0f} ms, Pulse whole {shown:.0f} ms\n")


def peak_mb() -> float:
    """Most memory that this process has had."""
    return peak_host_bytes() / 1e6


def make(run_dir: Path, steps: int, prompts: int, detailed: int) -> None:
    job = dataclasses.replace(
        JOB,
        num_steps=detailed,
        prompts_per_step=prompts,
        group_size=8,
        num_replicas=8,
        max_num_seqs=256,
        length_of=LogNormalLengths(mean=60, sigma=0.7, cap=300),
    )
    simulated_run(run_dir, job=job)
    for step in range(detailed + 1, steps + 1):
        for suffix in (".jsonl", ".npz"):
            of = run_dir / TRAJECTORIES
            os.link(of / f"step_{detailed:06d}{suffix}", of / f"step_{step:06d}{suffix}")
    add_metrics(run_dir / METRICS_FILE, detailed, steps)
    add_events(run_dir, detailed, steps)


def add_metrics(path: Path, detailed: int, steps: int) -> None:
    last = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:
        for step in range(detailed + 1, steps + 1):
            file.write(json.dumps(last | {"step": step, "time": last["time"] + step}) + "\n")


def add_events(run_dir: Path, detailed: int, steps: int) -> None:
    """The rare ones of the last step, for every step after it."""
    of_step = [
        stamped
        for stamped in EventReader(run_dir)
        if isinstance(stamped.event, OfStep)
        and stamped.event.global_steps == detailed
        and not stamped.event.is_frequent
    ]
    length = of_step[-1].time - of_step[0].time
    later = [
        Stamped(one.time + (step - detailed) * length, one.who, of(one.event, step))
        for step in range(detailed + 1, steps + 1)
        for one in of_step
    ]
    write(run_dir, later)


def of(event: Event, step: int) -> Any:
    return dataclasses.replace(event, global_steps=step)  # type: ignore[call-arg]


def measured(run_dir: Path, step: int) -> list[list[str]]:
    """Name, milliseconds of the first answer, and of the second, by the wall and of this process."""
    routes = Routes([run_dir])
    name = next(iter(routes.folders()))
    of_step = routes.open(name).index(step).entries[0].row

    def ask(route: str, **query: Any) -> Callable[[], Any]:
        return lambda: routes.answer(route, name, **query)

    questions: dict[str, Callable[[], Any]] = {
        "metrics": ask("metrics", keys=PULSE_KEYS),
        "advice": ask("advice"),
        "staleness of a step": ask("staleness", step=step - 1),
        "groups of a step": ask("groups", step=step - 2),
        "a trajectory": ask("trajectory", step=step, ordinal=of_step.ordinal, index=of_step.index),
        "events, passed over": lambda: pass_over(routes, name),
        "timeline of 3 steps": ask("timeline", first=step - 2, last=step),
        "batch of a step": ask("anatomy", step=step - 4),
        "fleet": ask("fleet"),
    }
    return [[what, *milliseconds(question), *milliseconds(question)] for what, question in questions.items()]


def pass_over(routes: Routes, name: str) -> None:
    while routes.answer("steps", name)["events_seen"] < 1:
        pass


def milliseconds(ask: Callable[[], Any]) -> list[str]:
    wall, own = time.perf_counter(), time.process_time()
    ask()
    return [f"{1e3 * (time.perf_counter() - wall):.0f}", f"{1e3 * (time.process_time() - own):.0f}"]


if __name__ == "__main__":
    main(sys.argv[1:])
