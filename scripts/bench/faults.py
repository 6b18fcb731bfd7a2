"""The question: what do faults cost? They are injected one after the other into running jobs, which are audited by what
was trained. Five minutes on two cores, with --vllm half an hour.

python -m scripts.bench.faults [--injections 100] [--kills 20] [--vllm] [--vllm-kills 3]

- simulated engines, virtual clock: replicas die, hang, fall silent or slow down, and agent loops raise or hang.
- simulated engines, real time: the whole job is killed by SIGKILL and resumes from its newest checkpoint.
- with --vllm: processes of whole runs of scripts.train are killed, stopped or slowed down, each in a run of its own;
  and one whole run is killed again and again: of three kills one at any moment, one inside a save, one inside a weight
  update. The run does not cooperate. A save or an update is observed from outside, by the checkpoint folder and the
  weights in shared memory. Whether a kill hit it is judged by what the driver left behind: only the driver publishes a
  checkpoint, and only the driver continues an update, so that both end with it even if a train worker writes for a
  moment longer. A kill that came too late is counted as one at any moment.

The last line is JSON, the sums of the table:

    injected                faults
    lost, twice             prompts that were never trained, or more than once
    restarted               trajectories that started again from their prompt
    descending_versions     trajectories with a token of an older version than the token before
    unbounded_waits         runs that did not end
"""

import asyncio
import json
import logging
import math
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from configs.checkpoint import CHECKPOINTS, MARKER
from configs.runtime.environment import REPO_ROOT
from configs.schema import Config
from rollout.engines.virtual_clock import run_virtual
from rollout.replica.lifecycle import ReplicaState
from scripts.bench.common import QUIET
from scripts.bench.faulty_job import FaultyReplica, Job, job_config
from scripts.bench.harness import Runs, make_parser, progress
from scripts.observe.audit import ascends, audit
from scripts.observe.tables import write_json
from scripts.simulate.stand_ins import Nothing
from trainer.tracking.sinks import METRICS_FILE, read_metrics
from trainer.tracking.trajectories import TRAJECTORIES

REPLICA_FAULTS = ("dies", "hangs", "silent", "slow")
LOOP_FAULTS = ("raises", "tool hangs")
SEED = 0
STEPS = 30
FAULTS_PER_JOB = 5
LONGEST_RUN_S = 20_000.0
"""Virtual seconds. A job that is not over by then waits for something that never happens."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the table: the cost of one kind of fault."""

    fault: str
    engine: str
    injected: int = 0
    """The faults, after each of which the job recovered."""
    lost: int = 0
    twice: int = 0
    restarted: int = 0
    descending_versions: int = 0
    recovery_s: list[float] = field(default_factory=list)
    tokens_again: float = 0
    """Tokens sampled again because they were lost. NaN where it is not known."""
    unbounded_waits: int = 0


SUMS = ("injected", "lost", "twice", "restarted", "descending_versions", "unbounded_waits")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--injections", type=int, default=100, help="of each fault of a part, on simulated engines")
    parser.add_argument("--kills", type=int, default=20, help="of the whole job, on simulated engines")
    parser.add_argument("--vllm", action="store_true", help="whole runs on vLLM too: minutes")
    kills_help = "of a whole run on vLLM, in turns at any moment, inside a save and inside a weight update"
    parser.add_argument("--vllm-kills", type=int, default=3, help=kills_help)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # every failed group is a warning
    rows = []
    for fault in (*REPLICA_FAULTS, *LOOP_FAULTS):
        progress(f"simulated: {fault}")
        rows.append(part_faults(fault, options.injections, SEED))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows.append(job_kills(options.kills, SEED, folder))
        if options.vllm:
            rows += [run_fault(fault, folder / fault.replace(" ", "-")) for fault in RUN_FAULTS]
            rows += run_kills(options.vllm_kills, SEED, folder / "run")
    show(rows)
    write_json({name: sum(getattr(row, name) for row in rows) for name in SUMS})


def show(rows: Sequence[Row]) -> None:
    by_arm = {
        f"{row.fault}, {row.engine}": {
            **{name: getattr(row, name) for name in SUMS},
            "recovery_s": median(row.recovery_s or [math.nan]),
            "tokens_again_each": row.tokens_again / max(1, row.injected),
        }
        for row in rows
    }
    title = "faults (recovery: median seconds until all replicas serve again, or the next step)"
    Runs.exact(by_arm).show(title, dict.fromkeys(SUMS, "g") | {"recovery_s": ".1f", "tokens_again_each": ".0f"})


# -- parts that break, on a virtual clock ------------------------------------------------------------------------------


class Trained(Nothing):
    """A recorder that keeps which prompts were trained, how many tokens, and how many trajectories descended."""

    def __init__(self) -> None:
        self.ordinals: list[int] = []
        self.tokens = 0
        self.descending_versions = 0

    def record_step(
        self, global_steps: int, metrics: Any, groups: Any, advantages: Any, tokens: Any = None, evidence: Any = None
    ) -> None:
        self.ordinals += [group.prompt.ordinal for group in groups]
        self.tokens += sum(group.num_tokens for group in groups)
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            for sequence in trajectory.sequences:
                self.descending_versions += not ascends([span.global_steps for span in sequence.spans])


def part_faults(fault: str, num_injections: int, seed: int, update_interval: int = 1) -> Row:
    """Inject one of REPLICA_FAULTS or LOOP_FAULTS into as many jobs on a virtual clock as it takes."""
    config = job_config(STEPS, update_interval=update_interval)
    row = Row(fault=f"replica {fault}" if fault in REPLICA_FAULTS else f"agent loop {fault}", engine="simulated")
    for number in range(0, num_injections, FAULTS_PER_JOB):
        run_virtual(_one_job(fault, config, row, random.Random(f"{fault}/{seed}/{number}")))
    return row


async def _one_job(fault: str, config: Config, row: Row, chance: random.Random) -> None:
    trained = Trained()
    job = Job(config, token_s=0.05, train_s=2.0, recorder=trained, resumed=None)
    injecting = asyncio.create_task(_inject(fault, job, config.rollout.num_replicas, row, chance))
    try:
        async with asyncio.timeout(LONGEST_RUN_S):
            await job.run()
    except TimeoutError:
        row.unbounded_waits += 1
    injecting.cancel()
    expected = STEPS * config.trainer.prompts_per_step
    row.lost += len(set(range(expected)) - set(trained.ordinals))
    row.twice += len(trained.ordinals) - len(set(trained.ordinals))
    row.restarted += job.rollouter.counters["restarted"]
    row.descending_versions += trained.descending_versions
    row.tokens_again += sum(replica.simulated.usage.tokens for replica in job.replicas) - trained.tokens


async def _inject(fault: str, job: Job, num_replicas: int, row: Row, chance: random.Random) -> None:
    """Inject faults at random moments, each after the job has recovered from the one before."""
    clock = asyncio.get_running_loop().time
    for _ in range(FAULTS_PER_JOB):
        await asyncio.sleep(chance.uniform(0.5, 8.0))
        row.injected += 1
        if fault in LOOP_FAULTS:
            job.loop.faults.append("raises" if fault == "raises" else "hangs")
            continue
        victim, broken_at = chance.choice(_in_service(job)), clock()
        victim.break_by(fault)
        while victim in _in_service(job) or len(_in_service(job)) < num_replicas:
            await asyncio.sleep(0.1)
        row.recovery_s.append(clock() - broken_at)


def _in_service(job: Job) -> list[FaultyReplica]:
    known = job.fleet.replicas
    return [r for r in job.replicas if r.name in known and known[r.name].state is ReplicaState.READY]


# -- whole jobs killed, on simulated engines ---------------------------------------------------------------------------


def job_kills(num_kills: int, seed: int, folder: Path, steps: int = 60) -> Row:
    """Kill whole jobs by SIGKILL at seeded random moments, one in five inside a save, until `num_kills` are done."""
    row = Row(fault="whole job killed", engine="simulated", tokens_again=math.nan)
    chance, number = random.Random(seed), 0
    while row.injected < num_kills:
        run_dir = folder / f"job-{number}"
        number += 1
        last_kill: float | None = None
        for kill in [*range(min(num_kills - row.injected, 5)), None]:  # None lets the job end
            command = [sys.executable, "-m", "scripts.bench.faulty_job", str(run_dir), str(steps)]
            job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO_ROOT)
            assert job.stdout is not None
            took_a_step = any(line.startswith("step") for line in iter(job.stdout.readline, ""))
            if took_a_step and last_kill is not None:
                row.recovery_s.append(time.monotonic() - last_kill)
            in_save = kill == 2
            after_s = 30.0 if in_save else chance.uniform(0.0, 1.5)
            killed = kill is not None and _kill_job(job, run_dir, after_s, in_save=in_save)
            job.stdout.read()
            if job.wait(120) == 0:
                break
            if not killed:
                raise RuntimeError(f"the job of {run_dir} ended with {job.returncode}, and was not killed")
            row.injected, last_kill = row.injected + 1, time.monotonic()
            progress(f"{row.fault}: {row.injected} of {num_kills}")
        _add_audit(row, run_dir, steps, refuses_findings=True)
    return row


def _kill_job(job: "subprocess.Popen[str]", run_dir: Path, after_s: float, *, in_save: bool) -> bool:
    """Kill the job after some time, or inside its next save. Returns False when the job had ended before."""
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline and job.poll() is None:
        if in_save and any((run_dir / CHECKPOINTS).glob(".step_*")):
            break
        time.sleep(POLL_S if in_save else 0.01)
    if job.poll() is not None:
        return False
    job.send_signal(signal.SIGKILL)
    return True


def _add_audit(row: Row, run_dir: Path, steps: int, *, refuses_findings: bool) -> None:
    """Add what the audit of a run folder finds. Raises RuntimeError where the run has broken its promises."""
    report = audit(run_dir)
    if refuses_findings and report.findings:
        raise RuntimeError(f"{run_dir}: {report.sentence}")
    if report.newer_versions or report.max_staleness > MAX_STALENESS:
        raise RuntimeError(f"{run_dir} has broken rollout.max_staleness={MAX_STALENESS}: {report}")
    row.lost += report.lost + report.missing_steps + steps - report.steps
    row.twice += report.twice
    row.descending_versions += report.descending_versions


# -- whole runs on vLLM ------------------------------------------------------------------------------------------------

RUN_STEPS = 200
MAX_STALENESS = 2
OVERRIDES = (
    *QUIET,
    "model=tiny",
    "trainer.eval_every=0",
    "trainer.prompts_per_step=8",
    "model.warmup_steps=50",
    "data.num_val=8",
    "checkpoint.every=5",
    "rollout.num_replicas=2",
    "rollout.replica_timeout_s=10",
    f"rollout.max_staleness={MAX_STALENESS}",
)
DEADLINE_S = 300.0
END_DEADLINE_S = 60.0
POLL_S = 0.0005
"""The time between two looks for a save or an update that has begun, which are over in milliseconds."""


class WholeRun:
    """A process of scripts.train, which resumes from the folder's newest checkpoint if it has one.

    Example:
        run = WholeRun(run_dir, steps=200)
        run.wait_for("step 5", lambda: run.steps >= 5)
        run.find("VLLM::EngineCore").kill()
        run.finish(row)
    """

    def __init__(self, run_dir: Path, steps: int, overrides: Sequence[str] = ()):
        self.run_dir, self._total_steps = run_dir, steps
        self._console = run_dir / f"console-{time.time_ns()}.txt"
        run_dir.mkdir(parents=True, exist_ok=True)
        own = (f"hydra.run.dir={run_dir}", "resume=auto", f"trainer.total_steps={steps}")
        command = [sys.executable, "-m", "scripts.train", *own, *OVERRIDES, *overrides]
        with self._console.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd=REPO_ROOT)

    def wait_for(self, event: str, holds: Callable[[], bool], poll_s: float = 0.1) -> bool:
        """Wait until `holds()`. Returns False when the run ended first. Raises TimeoutError past DEADLINE_S."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"{event} did not come within {DEADLINE_S:g} s; see {self.run_dir}")
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
        """The optimizer steps that this process has taken."""
        return sum(line.startswith("step ") and line.endswith("\n") for line in self._console.open())

    def has_printed(self, text: str) -> bool:
        return text in self._console.read_text()

    def find(self, title: str) -> psutil.Process:
        """Return a process of the run whose title begins with `title`."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it ended meanwhile
                if " ".join(child.cmdline()).startswith(title):
                    return child
        raise RuntimeError(f"the run of {self.run_dir} has no process {title}")

    def finish(self, row: Row) -> None:
        """Wait for the end of the run, and add what the faults have cost to the row. Raises RuntimeError where the run
        failed, or trained a token of a newer version or beyond rollout.max_staleness."""
        try:
            self.wait_for("the end", lambda: False)
        except TimeoutError:
            row.unbounded_waits += 1
            return
        if self.process.returncode != 0:
            raise RuntimeError(f"the run ended with {self.process.returncode}; see {self._console}")
        _add_audit(row, self.run_dir, self._total_steps, refuses_findings=False)
        row.restarted += int(json.loads((self.run_dir / "summary.json").read_text())["restarted"])


# -- parts of whole runs that break ------------------------------------------------------------------------------------

ENGINE, ACTOR = "VLLM::EngineCore", "ray::ReplicaActor"
SLOWER, SLOW_FACTOR = 10, 4
THROTTLE_PERIOD_S = 0.1


@contextmanager
def throttled(process: psutil.Process) -> Iterator[None]:
    """Let the process run for a tenth of the time, until it ends or the block does. It is left running."""
    is_over = threading.Event()

    def stop_and_go() -> None:
        with suppress(psutil.NoSuchProcess):
            while not is_over.is_set():
                try:
                    process.send_signal(signal.SIGSTOP)
                    is_over.wait((1 - 1 / SLOWER) * THROTTLE_PERIOD_S)
                finally:
                    process.send_signal(signal.SIGCONT)
                is_over.wait(THROTTLE_PERIOD_S / SLOWER)

    thread = threading.Thread(target=stop_and_go, name="throttle")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    title: str
    """The title of the process begins with this."""
    signal: signal.Signals | None
    """The signal that the process gets, for good. None: it is throttled until the run has recovered."""
    noticed: str = " is given up: "
    """The console says this when the run notices the fault; "" for nothing."""
    back: str | None = " is in service, "
    """The console says this when the run has recovered. None: it has recovered after four more steps."""
    overrides: tuple[str, ...] = ()


RUN_FAULTS = {
    "engine killed": Fault(title=ENGINE, signal=signal.SIGKILL),
    f"engine {SLOWER} times slower": Fault(
        title=ENGINE,
        signal=None,
        noticed=f"(rollout.slow_factor={SLOW_FACTOR})",
        overrides=(f"rollout.slow_factor={SLOW_FACTOR}",),
    ),
    "actor killed": Fault(title=ACTOR, signal=signal.SIGKILL),
    "actor stopped": Fault(title=ACTOR, signal=signal.SIGSTOP),
    "agent worker killed": Fault(title="ray::AgentWorkerActor", signal=signal.SIGKILL, noticed="", back=None),
    "train worker killed": Fault(
        title="ray::TrainWorkerActor", signal=signal.SIGKILL, noticed="", back="the train workers are back"
    ),
}


def run_fault(name: str, run_dir: Path) -> Row:
    """Break a part of a run once, wait until it has recovered, and let the run finish."""
    fault, row = RUN_FAULTS[name], Row(fault=name, engine="vLLM", tokens_again=math.nan)
    run = WholeRun(run_dir, RUN_STEPS, fault.overrides)
    run.wait_for("step 5", lambda: run.steps >= 5)
    before, began = run.steps, time.monotonic()
    process = run.find(fault.title)
    if fault.signal is not None:
        process.send_signal(fault.signal)
    with throttled(process) if fault.signal is None else nullcontext():
        row.injected = 1
        run.wait_for(fault.noticed, lambda: run.has_printed(fault.noticed))
        noticed_s = time.monotonic() - began
        if fault.back is None:
            came = run.wait_for("the next steps", lambda: run.steps >= before + 4)
        else:
            came = run.wait_for(fault.back, lambda: run.has_printed(fault.back or ""))
    if came:
        row.recovery_s.append(time.monotonic() - began)
        meanwhile = f"recovered after {row.recovery_s[0]:.1f} s; {run.steps - before} steps meanwhile"
        progress(f"{name}: noticed after {noticed_s:.1f} s, {meanwhile}")
    run.finish(row)
    return row


# -- whole runs killed -------------------------------------------------------------------------------------------------

AT_ANY_MOMENT = "whole run killed"
LONGEST_WAIT_S = 6.0
"""The longest time from the first step to a kill at any moment."""
STEPS_PER_KILL = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A save or an update that a kill is aimed at."""

    name: str
    begun: Callable[[Path], set[Path]]
    """Run folder -> the paths of targets in progress, one each, which appear when a target begins."""
    is_unfinished: Callable[[Path, Path], bool]
    """(run folder, path of the target) -> whether the driver has left it unfinished; called when the driver is dead."""
    metric: str
    """The metric that records how long a target took."""
    metric_s: float
    """The seconds in a unit of the metric."""
    passing: int
    """The number of targets that pass, at most, before the kill."""

    def shortest_s(self, run_dir: Path) -> float:
        """Return the shortest that a target has taken in this run; 0 when none has been recorded."""
        records = read_metrics(run_dir / METRICS_FILE)
        return self.metric_s * min((record[self.metric] for record in records if self.metric in record), default=0.0)


def _saves(run_dir: Path) -> set[Path]:
    return set((run_dir / CHECKPOINTS).glob(".step_*"))


def _is_unfinished_save(run_dir: Path, begun: Path) -> bool:
    """Return whether the temporary folder is still there, or has been renamed and has no marker."""
    renamed = begun.with_name(begun.name.split(".")[1])
    return begun.exists() or (renamed.exists() and not (renamed / MARKER).exists())


def _updates(run_dir: Path) -> set[Path]:
    from scripts.launch.start import owner  # imports Ray
    from weight_sync.transports.cleanup import DIRECTORY

    return set(DIRECTORY.glob(f"slipstream-{owner(run_dir)}-*"))


def _is_unfinished_update(run_dir: Path, begun: Path) -> bool:
    """Return whether the update's file, which is named when it begins, is left, and no step came after it."""
    step = int(begun.name.split("-")[-2])
    return begun.exists() and not (run_dir / TRAJECTORIES / f"step_{step:06d}.jsonl").exists()


SAVE = Aim(
    name=f"{AT_ANY_MOMENT} inside a save",
    begun=_saves,
    is_unfinished=_is_unfinished_save,
    metric="checkpoint/seconds",
    metric_s=1.0,
    passing=2,
)
UPDATE = Aim(
    name=f"{AT_ANY_MOMENT} inside an update",
    begun=_updates,
    is_unfinished=_is_unfinished_update,
    metric="weight_sync/total_ms",
    metric_s=1e-3,
    passing=7,
)


def run_kills(num_kills: int, seed: int, run_dir: Path) -> list[Row]:
    """Kill one run `num_kills` times and let it finish. What it lost or trained twice counts in the first row."""
    names = (AT_ANY_MOMENT, SAVE.name, UPDATE.name)
    rows = {name: Row(fault=name, engine="vLLM", tokens_again=math.nan) for name in names}
    chance, steps = random.Random(seed), STEPS_PER_KILL * (num_kills + 2)
    last: tuple[Row, float] | None = None
    for number in range(num_kills + 1):
        run = WholeRun(run_dir, steps)
        if run.wait_for("a step", lambda run=run: run.steps > 0) and last is not None:
            row, killed_at = last
            row.recovery_s.append(time.monotonic() - killed_at)
        name = _kill(run, (None, SAVE, UPDATE)[number % 3], chance) if number < num_kills else None
        if name is None:
            break
        rows[name].injected += 1
        last = rows[name], time.monotonic()
    run.finish(rows[AT_ANY_MOMENT])
    return list(rows.values())


def _kill(run: WholeRun, aim: Aim | None, chance: random.Random) -> str | None:
    """Kill the run at any moment, or inside a save or an update. Returns the name of the row that the kill counts in;
    None when the run had ended."""
    if aim is None:
        time.sleep(chance.uniform(0.0, LONGEST_WAIT_S))
        if run.process.poll() is not None:
            return None
        run.kill()
        return AT_ANY_MOMENT
    seen, new = aim.begun(run.run_dir), set[Path]()

    def begins() -> bool:
        new.update(aim.begun(run.run_dir) - seen)
        return bool(new)

    shortest_s, share = 0.0, chance.uniform(0.0, 0.8)
    for _ in range(1 + chance.randint(0, aim.passing)):
        shortest_s = aim.shortest_s(run.run_dir)
        seen |= new
        new.clear()
        if not run.wait_for(aim.name, begins, POLL_S):
            return None
    begun = new.pop()
    began = begun.stat().st_ctime  # changes when a file is renamed
    time.sleep(max(0.0, began + share * shortest_s - time.time()))
    after_s = run.kill() - began
    # A save says by its marker that it is over. An update that is over says nothing until the next step is recorded.
    is_cut = aim.is_unfinished(run.run_dir, begun) and (aim is SAVE or after_s < shortest_s)
    name = aim.name if is_cut else AT_ANY_MOMENT
    progress(f"{name}: {after_s:.3f} s after {begun.name} began, the shortest of this run took {shortest_s:.3f} s")
    return name


if __name__ == "__main__":
    main()
