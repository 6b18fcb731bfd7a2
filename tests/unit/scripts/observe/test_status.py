"""The state of a run, as its files and the process that its lock names tell it."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollout.events.event import Event
from scripts.command.run_folder import LOCK_FILE, Holder
from scripts.observe.run import REPLAYS, Run, named_runs
from scripts.observe.status import REPLAY, State, Status, read_status, spell
from tests.support.dashboards import JOB, started
from tests.support.happenings import at, write
from trainer.tracking.events.kinds import EvaluationEnded, EvaluationStarted, RunEnded

NOW = 1_764_000_100.0
BEGAN = NOW - 100
EVALUATED = EvaluationEnded(global_steps=0, accuracy=0.5, pinned=False, file="evaluations/step_000000.jsonl")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "config.yaml").write_text("")
    return Run.open(tmp_path)


def tell(run: Run, *events: Event) -> None:
    write(run.folder, [at(BEGAN + number, event) for number, event in enumerate(events)])


def record(run: Run, steps: int) -> None:
    rows = [
        {"step": n, "time": BEGAN + 10 * n, "timing_s/step": 10.0, "timing_s/elapsed": 10.0 * n} for n in range(steps)
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))


def lock(run: Run, holder: Holder) -> None:
    (run.folder / LOCK_FILE).write_text(json.dumps(dataclasses.asdict(holder)))


def by_this_process(began: float = BEGAN) -> Holder:
    return dataclasses.replace(Holder.this_process(), started=began)


def quiet(run: Run, seconds: float) -> None:
    """Set the time of the last change of every file."""
    for path in run.folder.rglob("*"):
        os.utime(path, (NOW - seconds, NOW - seconds))


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holder, "has_ended", False)


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holder, "has_ended", True)


def status(run: Run) -> Status:
    return read_status(run, NOW)


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize(
    ("events", "logs", "phase"),
    [
        ([], [], "starting Ray and the processes of the run"),
        ([], ["replica-0", "trainer-0"], "loading models in replica-0, trainer-0; "),
        ([started(JOB), EvaluationStarted(global_steps=0)], ["replica-0"], "evaluating before the first step"),
        (
            [started(JOB), EvaluationStarted(global_steps=0), EVALUATED],
            [],
            "waiting for the rollouts of the first step",
        ),
    ],
)
def test_a_run_that_starts_says_its_phase(run: Run, events: Sequence[Event], logs: Sequence[str], phase: str) -> None:
    lock(run, by_this_process())
    tell(run, *events)
    (run.folder / "logs").mkdir()
    for name in logs:
        (run.folder / "logs" / f"{name}.log").write_text("Loading weights\n")
    assert (status(run).state, status(run).step, status(run).elapsed_s) == (State.STARTING, None, 100)
    assert status(run).detail.startswith(phase) and status(run).text.endswith("1 min 40 s so far")
    assert ("says: Loading weights" in status(run).text) == (logs != [] and not events)


@pytest.mark.usefixtures("alive")
def test_a_run_that_trains_says_its_step_and_how_long_it_takes(run: Run) -> None:
    lock(run, by_this_process())
    tell(run, started(JOB))
    record(run, 6)
    found = status(run)
    assert (found.state, found.step, found.total) == (State.RUNNING, 5, JOB.num_steps)
    assert (found.elapsed_s, found.eta_s) == (50 + 50, 10 * (JOB.num_steps - 5))
    assert found.text == f"step 5 of {JOB.num_steps} · 1 min 40 s so far · about 30 s left"


@pytest.mark.usefixtures("alive")
def test_a_resumed_run_starts_again_even_after_a_failure_that_it_has_events_of(run: Run) -> None:
    record(run, 6)
    tell(run, started(JOB), RunEnded(exit_code=1, error="it broke"))
    lock(run, by_this_process(began=NOW - 20))
    assert status(run).state is State.STARTING and status(run).detail.startswith("resumes after step 5: starting Ray")


@pytest.mark.parametrize(
    ("code", "error", "state", "words"),
    [
        (0, None, State.FINISHED, "step 5 of 8"),
        (1, "ValueError: 7", State.FAILED, "ValueError: 7"),
        (3, None, State.FINISHED, "the audit found something"),
        (130, None, State.STOPPED, "step 5 of 8"),
    ],
)
def test_the_last_event_says_how_a_run_ended(run: Run, code: int, error: str | None, state: State, words: str) -> None:
    record(run, 6)
    (run.folder / LOCK_FILE).write_text("")
    tell(run, started(JOB), RunEnded(exit_code=code, error=error))
    assert status(run).state is state and words in status(run).text and status(run).eta_s is None


def test_a_failure_before_the_first_event_is_read_from_its_file(run: Run) -> None:
    (run.folder / "error.txt").write_text("Traceback\n  ...\n\nfailed: ValueError: the data has no rows\n")
    assert status(run).state is State.FAILED
    assert status(run).text == "before its first step · ValueError: the data has no rows"


def test_an_error_file_that_leads_elsewhere_is_not_read(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_text("a secret")
    (run.folder / "error.txt").symlink_to(secret)
    assert "a secret" not in status(run).text


def test_a_summary_says_that_it_finished_and_how_long_it_took(run: Run) -> None:
    record(run, 6)
    (run.folder / "summary.json").write_text('{"seconds": 7200.4}')
    assert (status(run).state, status(run).elapsed_s) == (State.FINISHED, 7200.4)
    (run.folder / "summary.json").write_text("{")
    assert (status(run).state, status(run).elapsed_s) == (State.FINISHED, None)


@pytest.mark.usefixtures("gone")
def test_a_run_whose_process_is_gone_was_killed(run: Run) -> None:
    lock(run, by_this_process())
    tell(run, started(JOB))
    assert status(run).state is State.KILLED and f"process {os.getpid()} is gone" in status(run).text


def test_a_process_that_was_killed_is_seen_to_be_gone(run: Run) -> None:
    code = "import sys, scripts.command.run_folder as r; from pathlib import Path\n"
    code += "with r.locked(Path(sys.argv[1])):\n    print('locked', flush=True)\n    sys.stdin.read()"
    command = [sys.executable, "-c", code, str(run.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        assert read_status(run).state is State.STARTING
        process.kill()
        process.wait()
    assert read_status(run).state is State.KILLED


@pytest.mark.parametrize(("seconds", "state"), [(30, State.RUNNING), (3000, State.SILENT)])
def test_a_process_on_another_host_is_judged_by_what_it_writes(run: Run, seconds: float, state: State) -> None:
    lock(run, dataclasses.replace(by_this_process(), host="node-3"))
    record(run, 6)
    quiet(run, seconds)
    assert status(run).state is state and ("on node-3 cannot be seen" in status(run).text) == (state is State.SILENT)


@pytest.mark.parametrize(("seconds", "state"), [(30, State.RUNNING), (3000, State.KILLED)])
def test_a_folder_without_a_lock_is_judged_by_what_is_written(run: Run, seconds: float, state: State) -> None:
    record(run, 6)
    quiet(run, seconds)
    assert status(run).state is state


def test_durations_are_said_as_people_say_them() -> None:
    assert [spell(s) for s in (0, 42, 200, 3600, 7500, 273600)] == [
        *("0 s", "42 s", "3 min 20 s", "1 h", "2 h 5 min", "3 d 4 h"),
    ]


def test_a_replay_says_of_what_and_is_listed_beside_its_run(run: Run) -> None:
    for name in ("exact", "algorithm.loss-gspo"):
        folder = run.folder / REPLAYS / name
        folder.mkdir(parents=True)
        for file, text in (("config.yaml", ""), ("summary.json", "{}")):
            (folder / file).write_text(text)
    of, own = run.folder.name, run.folder / REPLAYS
    assert read_status(Run.open(own / "exact"), NOW).detail == f"replay of {of}: its steps as they were"
    other = read_status(Run.open(own / "algorithm.loss-gspo"), NOW)
    assert other.state is State.FINISHED
    assert other.detail == f"replay of {of}: {REPLAY}" and "not what another run would have sampled" in REPLAY
    assert "replay" not in read_status(run, NOW).detail
    names = named_runs([run.folder])
    assert list(names)[0] == of and {f"{of}/exact", f"{of}/algorithm.loss-gspo"} < names.keys()
