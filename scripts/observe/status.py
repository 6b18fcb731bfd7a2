"""Say how a run is: starting, running, finished, failed, stopped or killed, at which step, and for how long.

The answer comes from the ends of a few files and from the process that driver.lock names, so that it is cheap enough
for a list of runs.
"""

import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.command.bookkeeping import ERROR_FILE
from scripts.command.command import STOPPED, UNPROVEN
from scripts.command.run_folder import LOCK_FILE, Holder, read_holder
from scripts.observe.files import finite_or_none, parse_objects, read_numbers, read_tail
from scripts.observe.run import EXACT, Run, last_change, replayed_run
from trainer.tracking.events.lines import event_files
from trainer.tracking.sinks import METRICS_FILE

TAIL_BYTES = 100_000
"""The end of metrics.jsonl and of the events that is read."""
ETA_STEPS = 20
"""The number of the latest steps whose mean duration tells how long the rest takes."""
QUIET_S = 60.0
"""The silence after which a run without a known process counts as killed."""
LONG_QUIET_S = 600.0
"""The silence after which a run on another host is no longer said to be running."""
MOST_CHARACTERS = 2_000
"""The longest text of an error or of a log line that is told."""


REPLAY = "what its rollouts would have taught with these keys, not what another run would have sampled"
"""The meaning of a replay with other values of the config."""


class State(Enum):
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """A person ended it: Ctrl-C, SIGTERM or SIGHUP."""
    KILLED = "killed"
    """Its process is gone, and has not written how it ended."""
    SILENT = "silent"
    """Its process is on another host, and nothing was written for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a run at one moment."""

    state: State
    step: int | None = None
    """The last step that was recorded, or None before the first one."""
    total: int | None = None
    """The number of steps that the run is to have."""
    elapsed_s: float | None = None
    eta_s: float | None = None
    updated: float | None = None
    """The time of the last change of one of its files, in seconds since the epoch."""
    detail: str = ""
    """The phase of a start, the error of a failure, or the reason for another state."""

    @property
    def is_live(self) -> bool:
        return self.state in (State.STARTING, State.RUNNING)

    @property
    def is_over(self) -> bool:
        return self.state in (State.FINISHED, State.FAILED, State.STOPPED, State.KILLED)

    @property
    def text(self) -> str:
        """The status as one line, without its state."""
        parts: list[str] = []
        if self.step is not None:
            parts.append(f"step {self.step}" + (f" of {self.total}" if self.total else ""))
        elif self.state is not State.STARTING:
            parts.append("before its first step")
        if self.detail:
            parts.append(self.detail)
        if self.elapsed_s is not None:
            parts.append(f"{spell(self.elapsed_s)} so far" if self.is_live else f"took {spell(self.elapsed_s)}")
        if self.eta_s is not None:
            parts.append(f"about {spell(self.eta_s)} left")
        return " · ".join(parts)


def spell(seconds: float) -> str:
    """Return a duration as people say it: 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = round(max(0.0, seconds))
    for size, name, small, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {name}" + (f" {rest} {small_name}" if rest else "")
    return f"{whole} s"


def read_status(run: Run, now: float | None = None) -> Status:
    """Return how the run is now. Raises OSError."""
    now = time.time() if now is None else now
    holder = read_holder(run.folder) if run.has(run.folder / LOCK_FILE) else None
    rows = _steps(run)
    events = _last_events(run)
    updated = _last_change(run.folder)
    state, detail = _state(run, events, holder, now - updated)
    started = 0.0 if holder is None else holder.started
    if state is State.RUNNING and (not rows or rows[-1].get("time", now) < started):
        state, detail = State.STARTING, _phase(run, rows, events)
    if (original := replayed_run(run.folder)) is not None:
        meaning = "its steps as they were" if run.folder.name == EXACT else REPLAY
        detail = "; ".join(filter(None, [f"replay of {original.name}: {meaning}", detail]))
    step = int(rows[-1]["step"]) if rows else None
    total = _total(run, events)
    is_live = state in (State.STARTING, State.RUNNING)
    eta_s = None
    if state is State.RUNNING and total and step is not None:
        eta_s = max(0, total - step) * fmean(row["timing_s/step"] for row in rows[-ETA_STEPS:])
    return Status(
        state=state,
        step=step,
        total=total,
        elapsed_s=_elapsed_s(run, rows, events, started, now if is_live else None),
        eta_s=eta_s,
        updated=updated or None,
        detail=detail[:MOST_CHARACTERS],
    )


def _state(run: Run, events: list[dict[str, Any]], holder: Holder | None, quiet_s: float) -> tuple[State, str]:
    """Return the state, RUNNING for STARTING too, and a reason."""
    if error := _error(run):
        return State.FAILED, error
    here = holder if holder is not None and holder.is_here else None
    if here is not None and not here.has_ended:
        return (State.FINISHED, "") if run.has_ended else (State.RUNNING, "")
    if (ended := _ended(events)) is not None:
        code, error = ended.get("exit_code"), str(ended.get("error") or "")
        if code == STOPPED:
            return State.STOPPED, ""
        if code == UNPROVEN:
            return State.FINISHED, error or "the audit found something"
        return (State.FINISHED, "") if code == 0 else (State.FAILED, error or f"exit code {code}")
    if run.has_ended:
        return State.FINISHED, ""
    if here is not None:
        return State.KILLED, f"process {here.pid} is gone and did not write how it ended"
    if holder is not None:
        if quiet_s < LONG_QUIET_S:
            return State.RUNNING, ""
        where = f"process {holder.pid} on {holder.host}"
        return State.SILENT, f"nothing has been written for {spell(quiet_s)}; {where} cannot be seen from this machine"
    if quiet_s < QUIET_S:
        return State.RUNNING, ""
    return State.KILLED, "nothing in its folder says how it ended"


def _error(run: Run) -> str:
    """Return the last line of error.txt, or "" if there is none."""
    path = run.folder / ERROR_FILE
    if not path.is_file() or not run.has(path):
        return ""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "it failed")
    return last.removeprefix("failed: ")


def _ended(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the latest `run_ended`, unless the run has begun again since."""
    for event in reversed(events):
        if event.get("kind") in ("run_ended", "run_started", "resumed"):
            return event if event["kind"] == "run_ended" else None
    return None


def _phase(run: Run, rows: list[dict[str, Any]], events: list[dict[str, Any]]) -> str:
    """Return a sentence on what a run does before its first step, or before the first step after a resume."""
    again = f"resumes after step {int(rows[-1]['step'])}: " if rows else ""
    kinds = [event.get("kind") for event in events]
    begun = max((place for place, kind in enumerate(kinds) if kind in ("run_started", "run_ended")), default=None)
    if events and (begun is None or kinds[begun] == "run_started"):
        since = kinds[begun or 0 :]
        if since.count("evaluation_started") > since.count("evaluation_ended"):
            return f"{again}evaluating before the first step"
        return f"{again}waiting for the rollouts of the first step"
    logs = sorted((path for path in run.logs().values()), key=lambda path: path.stat().st_mtime)
    names = sorted(path.stem for path in logs if path.name != "driver.log")
    if not names:
        return f"{again}starting Ray and the processes of the run"
    lines = [line for line in read_tail(logs[-1], TAIL_BYTES // 10) if line.strip()]
    said = f"; {logs[-1].stem} says: {lines[-1].decode(errors='replace').strip()[:160]}" if lines else ""
    return f"{again}loading models in {', '.join(names[:6])}{' and others' if len(names) > 6 else ''}{said}"


def _steps(run: Run) -> list[dict[str, Any]]:
    """Return the latest rows of steps, with their finite numbers only."""
    path = run.folder / METRICS_FILE
    rows = read_numbers(path, TAIL_BYTES) if run.has(path) else []
    return [row for row in rows if "step" in row and "timing_s/step" in row]


def _last_events(run: Run) -> list[dict[str, Any]]:
    """Return the events at the end of the last file, which has the end of a run, and with a short file its start."""
    files = event_files(run.folder)
    if not files or not run.has(files[-1][1]):
        return []
    return parse_objects(read_tail(files[-1][1], TAIL_BYTES))[0]


def _total(run: Run, events: list[dict[str, Any]]) -> int | None:
    """Return the number of steps by the latest start that is seen, or else by the first of the run."""
    started = [event for event in events if event.get("kind") == "run_started"]
    if not started and (files := event_files(run.folder)) and run.has(files[0][1]):
        with files[0][1].open("rb") as file:
            started = parse_objects(file.read(TAIL_BYTES).split(b"\n")[:1])[0]
    total = started[-1].get("total_steps") if started else None
    return total if isinstance(total, int) else None


def _elapsed_s(
    run: Run, rows: list[dict[str, Any]], events: list[dict[str, Any]], started: float, now: float | None
) -> float | None:
    """Return the seconds of the whole run, or of its steps if it has not written how long it took; None if unknown.
    `now` is None for a run that is over."""
    if now is None and run.has_ended:
        try:
            return finite_or_none((run.summary() or {}).get("seconds"))
        except ValueError:
            return None
    if rows:
        since = 0.0 if now is None else max(0.0, now - max(started, rows[-1].get("time", now)))
        elapsed = rows[-1].get("timing_s/elapsed")
        return None if elapsed is None else elapsed + since
    began = started or next((event["t"] for event in events if finite_or_none(event.get("t")) is not None), None)
    return None if began is None or now is None else max(0.0, now - began)


def _last_change(folder: Path) -> float:
    """Return when one of the files that a run writes all the time was last written."""
    paths = [path for _, path in event_files(folder)[-1:]] + [*(folder / "logs").glob("*.log")]
    return max([last_change(folder), *(path.stat().st_mtime for path in paths if path.is_file())])
