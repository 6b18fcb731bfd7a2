"""The files of a run: their content, and what is left of them on a failing disk, after a kill and after a resume."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from configs.load import key_docs
from rollout.types import DiscardedGroup, DiscardReason, EvaluatedPrompt, EvaluatedSample, VersionSpan
from tests.support.recordings import Evaluated, Screen, example_advantages, example_groups
from tests.support.sequences import only, with_sequence
from trainer.tokens import TrainedTokens
from trainer.tracking.recorder import FLAT_STEPS, FlatGroups, RunRecorder
from trainer.tracking.set_aside import SET_ASIDE, SetAside
from trainer.tracking.sinks import FailedWrites, JsonlSink, Tracker, read_metrics
from trainer.tracking.trajectories import (
    DiscardRecord,
    SampleRecord,
    TrajectoryRecord,
    trajectory_records,
)

R = TypeVar("R")
STEP_METRICS = {"staleness/max": 1.0, "timing_s/step": 0.5, "timing_s/elapsed": 1.0}


def read_records(path: Path, kind: type[R]) -> list[R]:
    """Read a file as json does, which takes halves of surrogate pairs."""
    return [msgspec.convert(json.loads(line), kind) for line in path.read_bytes().splitlines()]


def recorded(run_dir: Path) -> tuple[RunRecorder, Screen, Path]:
    """Two steps between two evaluations; only the second step updated the weights."""
    screen, path = Screen(), run_dir / "metrics.jsonl"
    tracker = Tracker([JsonlSink(path)])
    recorder = RunRecorder(run_dir, tracker, screen)
    recorder.record_evaluation(0, Evaluated(0.25))
    for step, staleness, more in ((1, 2.0, {}), (2, 1.0, {"weight_sync/pause_ms": 30.0})):
        metrics = {"staleness/max": staleness, "timing_s/step": step / 2, "timing_s/elapsed": float(step), **more}
        recorder.record_step(step, metrics, example_groups(), example_advantages())
    recorder.record_evaluation(2, Evaluated(0.75, versions=(2,), metrics={"val/aime/avg@32": 0.75}))
    tracker.close(0)
    return recorder, screen, path


def test_the_summary_of_a_run_without_an_evaluation_has_no_accuracy(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.steps(1, 2)
    summary = process.recorder.write_summary({})
    assert (summary["accuracy_before"], summary["accuracy_after"], summary["steps"]) == (None, None, 2)


def test_summary_has_every_key(tmp_path: Path) -> None:
    recorder, _, _ = recorded(tmp_path)
    returned = recorder.write_summary({"restarted": 0})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == returned
    seconds = summary.pop("seconds")
    assert 0 <= seconds < 60
    assert summary == {
        "accuracy_before": 0.25,
        "accuracy_after": 0.75,
        "steps": 2,
        "training_seconds": 1.5,
        "trajectories": 8,
        "spanning_trajectories": 2,
        "max_token_staleness": 2,
        "samples_per_second": round(8 / 1.5, 2),
        "pause_ms_p50": 30.0,
        "pause_ms_p99": 30.0,
        "skipped_steps": 0,
        "failed_writes": {},
        "dropped_events": 0,
        "recorded_since": 0,
        "restarted": 0,
    }


def test_steps_and_evaluations_reach_the_metrics_file_and_the_console(tmp_path: Path) -> None:
    _, screen, path = recorded(tmp_path)
    records = read_metrics(path)
    assert [record["step"] for record in records] == [0, 1, 2, 2]
    assert records[0]["eval/accuracy"] == 0.25
    assert records[2]["weight_sync/pause_ms"] == 30
    assert {key: value for key, value in records[3].items() if key.startswith("eval/")} == {
        "eval/accuracy": 0.75,
        "eval/response_length": 11.5,
        "eval/num_prompts": 256,
        "eval/pinned": 1,
        "eval/num_versions": 1,
        "eval/min_version": 2,
        "eval/max_version": 2,
    }
    assert records[3]["val/aime/avg@32"] == 0.75
    assert screen.events == ["evaluation 0 0.25", "step 1 0.5", "step 2 1", "evaluation 2 0.75"]


def test_trajectories_are_written_one_a_line_with_the_versions_of_their_tokens(tmp_path: Path) -> None:
    recorded(tmp_path)
    files = sorted((tmp_path / "trajectories").iterdir())
    assert [file.name for file in files] == ["step_000001.jsonl", "step_000002.jsonl"]
    lines = [json.loads(line) for line in files[1].read_text(encoding="utf-8").splitlines()]
    assert [(line["ordinal"], line["index"]) for line in lines] == [(30, 0), (30, 1), (31, 0), (31, 1)]
    assert lines[0] == {
        "ordinal": 30,
        "index": 0,
        "data_source": "",
        "prompt": "prompt 30",
        "response": "7 8 9 10",
        "ground_truth": "30",
        "reward": 1.0,
        "reward_metrics": {},
        "agent_metrics": {},
        "overlong_penalty": 0.0,
        "error": None,
        "advantage": 0.7,
        "sequences": [
            {
                "prompt_tokens": 3,
                "response_tokens": 4,
                "loss_tokens": 3,
                "versions": [[0, 1, 2], [1, 2, 4], [2, 4, 5]],
                "turns": [[0, 4]],
                "turn_rewards": [],
            }
        ],
        "finish_reason": "stop",
        "replica": "replica-0",
        "began": 0.0,
        "generate_s": 0.0,
        "reward_s": 0.0,
        "tool_s": 0.0,
        "score_s": 0.0,
        "row": None,
        "source": "",
        "source_ordinal": 0,
    }
    assert [line["advantage"] for line in lines] == [0.7, -0.7, 0.0, 0.0]


def test_what_is_between_two_turns_is_an_environments() -> None:
    (group, _) = example_groups()
    spans = (VersionSpan(0, 1, 2), VersionSpan(1, 2, 3), VersionSpan(3, 4, 3))
    (record,) = trajectory_records(group.prompt, [with_sequence(group.trajectories[0], spans=spans)], [None])
    assert record.sequences[0].turns == [(0, 2), (3, 4)]
    assert only(with_sequence(group.trajectories[0], spans=spans)).token_versions()[2] == -1


def test_text_that_utf8_cannot_hold_is_written_and_read_back(tmp_path: Path) -> None:
    """Half of a surrogate pair, as JSON may hold it: in an answer, or in the error of a reward."""
    group, *_ = example_groups()
    broken = replace(
        group,
        prompt=replace(group.prompt, ground_truth="a \ud800 数 \\ud800"),
        trajectories=tuple(replace(trajectory, error="\udfff") for trajectory in group.trajectories),
    )
    recorder = RunRecorder(tmp_path, Tracker([]), Screen())
    recorder.record_step(1, STEP_METRICS, [broken], example_advantages()[:1])
    path = tmp_path / "trajectories" / "step_000001.jsonl"
    assert "数" in path.read_text(encoding="utf-8")
    records = read_records(path, TrajectoryRecord)
    assert {(record.ground_truth, record.error) for record in records} == {("a \ud800 数 \\ud800", "\udfff")}


def test_the_tokens_of_a_step_are_kept_with_what_the_trainer_made_of_them_where_they_are_wanted(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, Tracker([]), Screen(), record_tokens=True)
    made = TrainedTokens.none(10)
    made.logprobs[:4] = [-1, -2, -3, -4]
    made.is_clipped[1] = made.is_rejected[2] = True
    for step, trained in ((6, None), (7, made)):
        recorder.record_step(step, STEP_METRICS, example_groups(), example_advantages(), trained)
    untrained, tokens = (np.load(tmp_path / "trajectories" / f"step_00000{step}.npz") for step in (6, 7))
    for arrays in (untrained, tokens):
        assert arrays["response_ids"].tolist() == [7, 8, 9, 10, 7, 8, 9, 9, 9, 9]
        assert arrays["rollout_logprobs"].dtype == np.float32 and len(arrays["versions"]) == 10
    assert "trainer_logprobs" not in untrained, "of a step that was not trained"
    logprobs = tokens["trainer_logprobs"]
    assert logprobs[:4].tolist() == [-1, -2, -3, -4] and np.isnan(logprobs[4:]).all()
    assert (tokens["is_clipped"].sum(), tokens["is_rejected"].sum(), len(tokens["token_advantages"])) == (1, 1, 10)


def test_samples_of_evaluations_and_discarded_groups_are_written_and_go_aside_with_their_steps(tmp_path: Path) -> None:
    sample = EvaluatedSample(accuracy=1.0, answer="7", num_tokens=3, versions=frozenset({3, 2}), response="it is 7")
    prompt = EvaluatedPrompt(ordinal=4, data_source="aime", samples=(sample,), text="3 + 4?", ground_truth="7")
    process = Process(tmp_path)
    group, *_ = example_groups()
    for step in range(1, 4):
        process.recorder.record_discarded(DiscardedGroup(prompt=group.prompt, reason=DiscardReason.failed, error="bad"))
        process.steps(step, step)
        process.recorder.record_evaluation(step, Evaluated(1.0, prompts=(prompt,)))
    records = read_records(tmp_path / "evaluations" / "step_000003.jsonl", SampleRecord)
    assert asdict(records[0]) == {
        **{"ordinal": 4, "index": 0, "data_source": "aime", "prompt": "3 + 4?", "response": "it is 7"},
        **{"ground_truth": "7", "accuracy": 1.0, "answer": "7", "error": None, "versions": [2, 3]},
        "response_tokens": 3,
        "source": "",
    }

    def discarded(folder: Path) -> list[tuple[int, str, int, str | None]]:
        files = sorted((folder / "discarded").iterdir())
        records = [record for path in files for record in read_records(path, DiscardRecord)]
        return [(record.ordinal, record.reason, record.global_steps, record.error) for record in records]

    assert discarded(tmp_path) == [(30, "failed", step, "bad") for step in range(3)]
    Process(tmp_path).restore(process.recorder.state(), 2)
    again = Process(tmp_path)
    again.restore(process.recorder.state(), 2)
    again.recorder.record_evaluation(2, Evaluated(0.0, prompts=()))  # of a run that was at its end
    first, aside = sorted((tmp_path / SET_ASIDE).iterdir())[::-1]
    assert [path.name for path in (first / "evaluations").iterdir()] == names(2)
    assert [one[2] for one in discarded(tmp_path)] == [0, 1] and [one[2] for one in discarded(aside)] == [2]
    assert [path.name for path in (aside / "evaluations").iterdir()] == names(3)


# -- skipped steps -----------------------------------------------------------------------------------------------------


def test_the_batch_is_kept_so_that_numpy_reads_it(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, Tracker([]), Screen())
    for count in (1, 2):
        skipped, sentence = recorder.record_skipped_step(
            12, "not finite: b=nan", example_groups(), example_advantages()
        )
        assert skipped == count
    path = tmp_path / "bad_batches" / "step_000012.npz"
    assert sentence == f"step 12 was skipped, not finite: b=nan; its batch is {path}, prompts 30, 31"
    batch = np.load(path)  # the documented line
    assert {name: batch[name].tolist() for name in batch if name not in ("advantages", "baselines")} == {
        "format": 2,
        "ordinals": [30, 30, 31, 31],
        "replicas": ["replica-0"] * 4,
        "rewards": [1, 0, 1, 1],
        "num_sequences": [1, 1, 1, 1],
        "prompt_lengths": [3, 3, 1, 1],
        "response_lengths": [4, 2, 2, 2],
        "prompt_ids": [1, 2, 3, 1, 2, 3, 1, 1],
        "response_ids": [7, 8, 9, 10, 7, 8, 9, 9, 9, 9],
        "loss_mask": [False] + [True] * 9,
        "rollout_logprobs": [0] * 10,
        "versions": [2, 4, 5, 5, 5, 5, 6, 6, 6, 6],
    }
    assert batch["advantages"].tolist() == pytest.approx([0.7, -0.7, 0, 0])
    assert np.isnan(batch["baselines"]).all()


# -- several processes -------------------------------------------------------------------------------------------------


class Process:
    """One start of a run in `run_dir`: the recorder, and what the console was told."""

    def __init__(self, run_dir: Path):
        self.said: list[str] = []
        tracker = Tracker([JsonlSink(run_dir / "metrics.jsonl")], FailedWrites(self.said.append))
        self.recorder = RunRecorder(run_dir, tracker, Screen())
        self._run_dir = run_dir

    def restore(self, state: bytes, global_steps: int) -> None:
        self.recorder.restore(state, global_steps, SetAside(self._run_dir, global_steps))

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
    (tmp_path / "bad_batches").write_text("another file in the place of a folder")
    assert process.recorder.record_skipped_step(4, "", example_groups(), example_advantages())[0] == 1
    (tmp_path / "summary.json").mkdir()
    process.recorder.record_evaluation(4, Evaluated(0.5))
    summary = process.recorder.write_summary({})
    assert summary["failed_writes"] == {"trajectories": 2, "metrics.jsonl": 2, "bad_batches": 1}
    assert summary["steps"] == 4 and process.said[-1].startswith("summary.json cannot be written")


# -- resume ------------------------------------------------------------------------------------------------------------


def test_what_is_set_aside_comes_after_what_was_before_whatever_the_clock_says(tmp_path: Path) -> None:
    """The config of a step is that of the last process that began before it: replays and audits count on the order."""
    (tmp_path / SET_ASIDE / "2999-12-31_23-59-59-step_000020").mkdir(parents=True)
    (tmp_path / SET_ASIDE / "of-mine-step_1").mkdir()
    for step in (10, 5):
        SetAside(tmp_path, step).write(tmp_path / "x", b"1")
    folders = sorted(path.parent.name for path in (tmp_path / SET_ASIDE).glob("*/x"))
    assert folders == ["3000-01-01_00-00-00-step_000010", "3000-01-01_00-00-01-step_000005"]


def test_counts_and_clocks_go_on_and_what_came_after_the_checkpoint_is_set_aside(tmp_path: Path) -> None:
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
    second.restore(state, 3)
    steps = [(record["step"], "eval/accuracy" in record) for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [(0, True), (1, False), (2, False), (3, False), (2, True)]
    assert trajectories(tmp_path) == names(1, 2, 3)
    assert [path.name for path in (tmp_path / "bad_batches").iterdir()] == ["step_000003.npz"]
    (aside,) = (tmp_path / SET_ASIDE).iterdir()
    assert aside.name.endswith("-step_000003") and trajectories(aside) == names(4, 5, 6)
    assert [record["step"] for record in read_metrics(aside / "metrics.jsonl")] == [4, 5, 6, 6]
    assert [path.name for path in (aside / "bad_batches").iterdir()] == ["step_000005.npz"]
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
        resumed.restore(state, 2)
        assert [resumed.recorder.is_evaluated(step) for step in range(4)] == [True, False, True, False]
        assert [accuracy for _, accuracy in resumed.recorder.counts.accuracies] == [0.25, 0.5]
        state = resumed.recorder.state()
    elsewhere = Process(tmp_path / "new folder")
    elsewhere.restore(first.recorder.state(), 3)
    assert elsewhere.recorder.is_evaluated(3), "there are no metrics of before, but the state knows"


def test_the_seconds_of_all_processes_are_counted(tmp_path: Path) -> None:
    state = json.loads(Process(tmp_path).recorder.state()) | {"seconds": 1000.0}
    for _ in range(2):
        process = Process(tmp_path)
        process.restore(json.dumps(state).encode(), 0)
        state = json.loads(process.recorder.state())
        assert 1000 < state["seconds"] < 1060


class Killed(BaseException):
    """The process is gone: nothing after it happens, as nothing would after SIGKILL."""


def killed_at(call: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether `act` was stopped before the `call`-th change that it makes to the disk."""
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
        for name in ("write_bytes", "replace", "rename"):
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
            is_cut = killed_at(of_resume, partial(resumed.restore, state, 2), monkeypatch)
            last = Process(run_dir)
            last.restore(state, 2)
            assert [record["step"] for record in read_metrics(run_dir / "metrics.jsonl")] == [1, 2]
            files = {path.relative_to(run_dir) for path in run_dir.rglob("*") if path.is_file()}
            moved = {path for path in files if path.parts[0] == SET_ASIDE}
            assert sorted(path.name for path in files - moved) == ["metrics.jsonl", "proof.jsonl", *names(1, 2)]
            of_step_3 = {Path("metrics.jsonl"), Path("trajectories", *names(3))}
            assert of_step_3 <= {Path(*path.parts[2:]) for path in moved}, "history is moved, not deleted"
            moments += 1
            if not is_cut:
                break
        if not step_is_cut:
            break
    assert moments > 10


# -- groups that teach nothing -----------------------------------------------------------------------------------------


def said(shares: list[float]) -> list[str]:
    lines: list[str] = []
    flat_groups = FlatGroups(lines.append)
    for step, share in enumerate(shares, start=1):
        solved = {"rollout/solve_all": share - 0.1, "rollout/solve_none": 0.1}
        flat_groups.watch(step, {"rollout/zero_variance_groups": share, **solved})
    return lines


def test_most_groups_without_a_gradient_are_said_once() -> None:
    (line,) = said([0.2] * 5 + [0.9] * 40)
    assert line.startswith(
        "steps 1 to 10: 55% of the groups had equal rewards and no gradient (45% were solved by every trajectory, "
        "10% by none). algorithm.filter_groups=true samples"
    )
    assert {"algorithm.filter_groups", "algorithm.group_size", "data.train_files"} <= set(key_docs())


@pytest.mark.parametrize("shares", [[0.5] * 30, [1.0] * (FLAT_STEPS - 1), [0.2, 1.0] * 4 + [0.1] * 30])
def test_fewer_or_only_a_few_steps_are_not(shares: list[float]) -> None:
    assert said(shares) == []
