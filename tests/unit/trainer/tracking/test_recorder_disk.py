"""What a run leaves behind when the disk fails, when it is killed, and when it is resumed."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.unit.trainer.tracking.test_recorder import Evaluated, Screen, example_advantages, example_groups
from trainer.tracking import files
from trainer.tracking.files import FailedWrites
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.sinks import JsonlSink, Tracker, read_metrics


class Process:
    """One start of a run in `run_dir`: the recorder, and what the console was told."""

    def __init__(self, run_dir: Path):
        self.said: list[str] = []
        tracker = Tracker([JsonlSink(run_dir / "metrics.jsonl")], FailedWrites(self.said.append))
        self.recorder = RunRecorder(run_dir, tracker, Screen())

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            metrics = {"staleness/max": 1.0, "timing_s/step": 0.5, "timing_s/elapsed": float(step - first + 1)}
            metrics["weight_sync/pause_ms"] = float(step)
            self.recorder.record_step(step, metrics, example_groups(), example_advantages())


def trajectories(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "trajectories").iterdir())


def names(*steps: int) -> list[str]:
    return [f"step_{step:06d}.jsonl" for step in steps]


# -- a disk that fails -------------------------------------------------------------------------------------------------


def test_training_goes_on_without_a_disk_and_the_files_come_back_with_it(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.steps(1, 1)
    (tmp_path / "trajectories").rename(tmp_path / "aside")
    (tmp_path / "trajectories").write_text("a file in the place of the folder")
    (tmp_path / "metrics.jsonl").rename(tmp_path / "aside.jsonl")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    process.steps(2, 3)
    (tmp_path / "trajectories").unlink()
    (tmp_path / "aside").rename(tmp_path / "trajectories")
    (tmp_path / "aside.jsonl").rename(tmp_path / "metrics.jsonl")
    process.steps(4, 4)
    assert trajectories(tmp_path) == names(1, 4)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["tracking/failed_writes"]) for record in records] == [(1, 0), (4, 4)]
    assert [sentence.partition(":")[0] for sentence in process.said] == [
        "trajectories cannot be written, the training goes on",
        "metrics.jsonl cannot be written, the training goes on",
    ]
    process.recorder.record_evaluation(4, Evaluated(0.5))
    summary = process.recorder.write_summary({})
    assert summary["failed_writes"] == {"trajectories": 2, "metrics.jsonl": 2} and summary["steps"] == 4


def test_a_summary_that_cannot_be_written_is_returned_nevertheless(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.recorder.record_evaluation(0, Evaluated(0.25))
    process.steps(1, 1)
    (tmp_path / "summary.json").mkdir()
    assert process.recorder.write_summary({})["accuracy_before"] == 0.25
    assert len(process.said) == 1 and process.said[0].startswith("summary.json cannot be written")


# -- resume ------------------------------------------------------------------------------------------------------------


def test_counts_and_clocks_go_on_and_what_came_after_the_checkpoint_is_gone(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.recorder.record_evaluation(0, Evaluated(0.25))
    first.steps(1, 3)
    first.recorder.record_skipped_step(3, "", example_groups(), example_advantages())
    state = first.recorder.state()
    first.steps(4, 6)
    first.recorder.record_skipped_step(5, "", example_groups(), example_advantages())
    first.recorder.record_evaluation(2, Evaluated(0.5, versions=(2,)))
    first.recorder.record_evaluation(6, Evaluated(0.75, versions=(6,)))

    second = Process(tmp_path)
    second.recorder.restore(state, 3)
    steps = [(record["step"], "eval/accuracy" in record) for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [(0, True), (1, False), (2, False), (3, False), (2, True)]
    assert trajectories(tmp_path) == names(1, 2, 3)
    assert [path.name for path in (tmp_path / "bad_batches").iterdir()] == ["step_000003.npz"]
    second.steps(4, 5)
    second.recorder.record_evaluation(5, Evaluated(1.0, versions=(5,)))
    summary = second.recorder.write_summary({})
    kept = ("steps", "trajectories", "training_seconds", "accuracy_before", "accuracy_after", "skipped_steps")
    assert {key: summary[key] for key in kept} == {
        "steps": 5,
        "trajectories": 20,
        "training_seconds": 2.5,
        "accuracy_before": 0.25,
        "accuracy_after": 1.0,
        "skipped_steps": 1,
    }
    assert summary["pause_ms_p50"] == 3.0
    assert json.loads(state)["seconds"] <= summary["seconds"]
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "timing_s/elapsed" in record]
    assert [record["timing_s/elapsed"] for record in records] == [1, 2, 3, 4, 5]
    assert trajectories(tmp_path) == names(1, 2, 3, 4, 5)


def test_an_evaluation_that_ended_after_the_checkpoint_was_saved_is_not_forgotten(tmp_path: Path) -> None:
    """It is of the checkpoint's version, which the run goes on from."""
    first = Process(tmp_path)
    first.recorder.record_evaluation(0, Evaluated(0.25))
    first.steps(1, 2)
    state = first.recorder.state()
    first.recorder.record_evaluation(2, Evaluated(0.5, versions=(2,)))
    first.steps(3, 3)
    first.recorder.record_evaluation(3, Evaluated(0.75, versions=(3,)))
    for _ in range(2):
        resumed = Process(tmp_path)
        resumed.recorder.restore(state, 2)
        assert [resumed.recorder.is_evaluated(step) for step in range(4)] == [True, False, True, False]
        assert [accuracy for _, accuracy in resumed.recorder.counts.accuracies] == [0.25, 0.5]
        state = resumed.recorder.state()
    elsewhere = Process(tmp_path / "new folder")
    elsewhere.recorder.restore(first.recorder.state(), 3)
    assert elsewhere.recorder.is_evaluated(3), "there are no metrics of before, but the state knows"


def test_the_seconds_of_all_processes_are_counted(tmp_path: Path) -> None:
    state = json.loads(Process(tmp_path).recorder.state()) | {"seconds": 1000.0}
    for _ in range(2):
        process = Process(tmp_path)
        process.recorder.restore(json.dumps(state).encode(), 0)
        state = json.loads(process.recorder.state())
        assert 1000 < state["seconds"] < 1060


class Killed(BaseException):
    """The process is gone: nothing after it happens, as nothing would after SIGKILL."""


def killed_at(call: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether `act` was stopped before the `call`-th change that it makes to the disk."""
    made = 0

    def counted(change: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            nonlocal made
            if made == call:
                raise Killed
            made += 1
            return change(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        for name in ("write_bytes", "replace", "unlink"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            act()
        except Killed:
            return True
    return False


def test_a_kill_at_any_moment_of_a_step_or_of_a_resume_leaves_nothing_half_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = 0
    for of_step in range(9):
        for of_resume in range(9):
            run_dir = tmp_path / f"{of_step}-{of_resume}"
            first = Process(run_dir)
            first.steps(1, 2)
            state = first.recorder.state()
            first.steps(3, 3)
            step_is_cut = killed_at(of_step, partial(first.steps, 4, 4), monkeypatch)
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.write('{"step": 5, "ti')  # and a line that was being written
            resumed = Process(run_dir)
            is_cut = killed_at(of_resume, partial(resumed.recorder.restore, state, 2), monkeypatch)
            last = Process(run_dir)
            last.recorder.restore(state, 2)
            assert [record["step"] for record in read_metrics(run_dir / "metrics.jsonl")] == [1, 2]
            left = [path for path in run_dir.rglob("*") if path.is_file()]
            assert sorted(path.name for path in left) == ["metrics.jsonl", *names(1, 2)]
            moments += 1
            if not is_cut:
                break
        if not step_is_cut:
            break
    assert moments > 10


def test_writes_are_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    files.write_atomically(path, b"old")
    files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(path.parent) == ["b.json"]
