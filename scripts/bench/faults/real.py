"""Faults in whole runs of scripts.train on real engines, each in a run of its own: an engine killed or throttled, an
actor killed or stopped, an agent worker killed, a train worker killed."""

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from scripts.bench.common import write_line
from scripts.bench.faults.kills import kill_rows
from scripts.bench.faults.report import Row
from scripts.bench.faults.whole_run import WholeRun, throttled

STEPS = 200
ENGINE, ACTOR = "VLLM::EngineCore", "ray::ReplicaActor"
SLOWER = 10
SLOW_FACTOR = 4


def _signalled(number: signal.Signals, process: psutil.Process) -> AbstractContextManager[None]:
    process.send_signal(number)
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    title: str
    """The title of the process begins with this."""
    inflict: Callable[[psutil.Process], AbstractContextManager[None]]
    """Context manager: the fault lasts, at most, until the run has recovered."""
    noticed: str = " is given up: "
    """The console says this when the run notices the fault; "" for nothing."""
    back: str | None = " is in service, "
    """The console says this when the run has recovered. None: it has recovered after four more steps."""
    overrides: tuple[str, ...] = ()


KILLED, STOPPED = partial(_signalled, signal.SIGKILL), partial(_signalled, signal.SIGSTOP)
FAULTS = {
    "engine killed": Fault(title=ENGINE, inflict=KILLED),
    f"engine {SLOWER} times slower": Fault(
        title=ENGINE,
        inflict=partial(throttled, share=1 / SLOWER),
        noticed=f"(rollout.slow_factor={SLOW_FACTOR})",
        overrides=(f"rollout.slow_factor={SLOW_FACTOR}",),
    ),
    "actor killed": Fault(title=ACTOR, inflict=KILLED),
    "actor stopped": Fault(title=ACTOR, inflict=STOPPED),
    "agent worker killed": Fault(title="ray::AgentWorkerActor", inflict=KILLED, noticed="", back=None),
    "train worker killed": Fault(
        title="ray::TrainWorkerActor", inflict=KILLED, noticed="", back="the train workers are back"
    ),
}


def real_rows(num_kills: int, seed: int, folder: Path) -> list[Row]:
    rows = [part_fault(fault, folder / fault.replace(" ", "-")) for fault in FAULTS]
    return [*rows, *kill_rows(num_kills, seed, folder / "run")]


def part_fault(name: str, run_dir: Path) -> Row:
    """Break a part of a run once, wait until it has recovered, and let the run finish."""
    fault, row = FAULTS[name], Row(fault=name, engine="vLLM", tokens_again=float("nan"))
    run = WholeRun(run_dir, STEPS, fault.overrides)
    run.wait_for("step 5", lambda: run.steps >= 5)
    before, began = run.steps, time.monotonic()
    with fault.inflict(run.find(fault.title)):
        row.injected = 1
        run.wait_for(fault.noticed, lambda: run.said(fault.noticed))
        noticed_s = time.monotonic() - began
        if fault.back is None:
            came = run.wait_for("the next steps", lambda: run.steps >= before + 4)
        else:
            came = run.wait_for(fault.back, lambda: run.said(fault.back or ""))
    if came:
        row.recovery_s.append(time.monotonic() - began)
        write_line(
            f"{name}: noticed after {noticed_s:.1f} s, recovered after {row.recovery_s[0]:.1f} s; "
            f"{run.steps - before} steps meanwhile"
        )
    run.finish(row)
    return row
