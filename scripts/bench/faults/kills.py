"""A whole run on vLLM, killed again and again: of three kills one at any moment, one inside a save, one inside a weight
update.

The run does not cooperate. A save or an update is observed from outside, by the checkpoint folder and the weights in
shared memory. Whether a kill hit it is judged by what the driver left behind: only the driver publishes a checkpoint,
and only the driver continues an update, so that both end with it even if a train worker writes for a moment longer. A
kill that came too late is counted as one at any moment.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from configs.checkpoint import CHECKPOINTS, MARKER
from scripts.bench.common import write_line
from scripts.bench.faults.report import Row
from scripts.bench.faults.whole_run import WholeRun
from scripts.launch.start import owner
from trainer.tracking.recorder import TRAJECTORIES
from trainer.tracking.sinks import METRICS_FILE, read_metrics
from weight_sync.transports.cleanup import DIRECTORY

AT_ANY_MOMENT = "whole run killed"
LONGEST_WAIT_S = 6.0
"""Longest time from the first step to a kill at any moment."""
POLL_S = 0.0005
STEPS_PER_KILL = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A kill, and the save or update it was aimed at."""

    run_dir: Path
    begun: Path
    """The file or folder that appeared when the target began."""
    after_s: float
    """From the beginning of the target to the kill."""
    shortest_s: float
    """The shortest that such a target has taken in this run; 0 when none has been recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    name: str
    begun: Callable[[Path], set[Path]]
    """Run folder -> the paths of targets in progress, one each."""
    hit: Callable[[Cut], bool]
    """Whether the kill cut the target off; called when the driver is dead."""
    metric: str
    """The metric that records how long a target took."""
    metric_s: float
    """Seconds in a unit of the metric."""
    passing: int
    """At most this many targets pass before the kill."""


def _saves(run_dir: Path) -> set[Path]:
    return set((run_dir / CHECKPOINTS).glob(".step_*"))


def save_was_cut(cut: Cut) -> bool:
    """The temporary folder is still there, or it has been renamed but has no marker."""
    renamed = cut.begun.with_name(cut.begun.name.split(".")[1])
    return cut.begun.exists() or (renamed.exists() and not (renamed / MARKER).exists())


def _updates(run_dir: Path) -> set[Path]:
    return set(DIRECTORY.glob(f"slipstream-{owner(run_dir)}-*"))


def update_was_cut(cut: Cut) -> bool:
    """The update's file, which is named when it begins, is left; no step came after it; and no update of this run was
    shorter."""
    step = int(cut.begun.name.split("-")[-2])
    is_recorded = (cut.run_dir / TRAJECTORIES / f"step_{step:06d}.jsonl").exists()
    return cut.begun.exists() and not is_recorded and cut.after_s < cut.shortest_s


SAVE = Aim(
    name=f"{AT_ANY_MOMENT} inside a save",
    begun=_saves,
    hit=save_was_cut,
    metric="checkpoint/seconds",
    metric_s=1.0,
    passing=2,
)
UPDATE = Aim(
    name=f"{AT_ANY_MOMENT} inside an update",
    begun=_updates,
    hit=update_was_cut,
    metric="weight_sync/total_ms",
    metric_s=1e-3,
    passing=7,
)


def kill_rows(num_kills: int, seed: int, run_dir: Path) -> list[Row]:
    """Kill one run `num_kills` times and let it finish. What it lost or trained twice counts in the first row."""
    names = (AT_ANY_MOMENT, SAVE.name, UPDATE.name)
    rows = {name: Row(fault=name, engine="vLLM", tokens_again=float("nan")) for name in names}
    chance = random.Random(seed)
    steps = STEPS_PER_KILL * (num_kills + 2)
    last: tuple[Row, float] | None = None
    for aim in islice(cycle((None, SAVE, UPDATE)), num_kills):
        run = _started(run_dir, steps, last)
        name = _kill(run, chance) if aim is None else _kill_inside(run, aim, chance)
        if name is None:
            break
        rows[name].injected += 1
        last = rows[name], time.monotonic()
    _started(run_dir, steps, last).finish(rows[AT_ANY_MOMENT])
    return list(rows.values())


def _started(run_dir: Path, steps: int, last: tuple[Row, float] | None) -> WholeRun:
    """Start the run and wait for its first step, or its end. `last`: the previous kill and its time."""
    run = WholeRun(run_dir, steps)
    if run.wait_for("a step", lambda: run.steps > 0) and last is not None:
        row, killed_at = last
        row.recovery_s.append(time.monotonic() - killed_at)
    return run


def _kill(run: WholeRun, chance: random.Random) -> str | None:
    """Kill the run at any moment. Returns the name of the row; None when the run had ended."""
    time.sleep(chance.uniform(0.0, LONGEST_WAIT_S))
    if run.process.poll() is not None:
        return None
    run.kill()
    return AT_ANY_MOMENT


def _kill_inside(run: WholeRun, aim: Aim, chance: random.Random) -> str | None:
    """Kill the run inside a save or update. Returns the name of the row it counts in; None when the run had ended."""
    seen, found = aim.begun(run.run_dir), set[Path]()

    def begins() -> bool:
        found.update(aim.begun(run.run_dir) - seen)
        return bool(found)

    shortest_s, share = 0.0, chance.uniform(0.0, 0.8)
    for _ in range(1 + chance.randint(0, aim.passing)):
        shortest_s = _shortest_s(run.run_dir, aim)
        seen |= found
        found.clear()
        if not run.wait_for(aim.name, begins, POLL_S):
            return None
    begun = found.pop()
    began = begun.stat().st_ctime  # changes when a file is renamed
    time.sleep(max(0.0, began + share * shortest_s - time.time()))
    cut = Cut(run_dir=run.run_dir, begun=begun, after_s=run.kill() - began, shortest_s=shortest_s)
    name = aim.name if aim.hit(cut) else AT_ANY_MOMENT
    write_line(
        f"{name}: {cut.after_s:.3f} s after {begun.name} began, the shortest of this run took {shortest_s:.3f} s"
    )
    return name


def _shortest_s(run_dir: Path, aim: Aim) -> float:
    records = read_metrics(run_dir / METRICS_FILE)
    return aim.metric_s * min((record[aim.metric] for record in records if aim.metric in record), default=0.0)
