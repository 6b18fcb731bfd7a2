"""What a step's groups say (batch_metrics) and what a run leaves behind (recorder): golden numbers and files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from rollout.types import FloatArray, TrajectoryGroup, VersionSpan
from tests.support.reference import make_group, make_trajectory
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.sinks import JsonlSink, Tracker, read_metrics
from trainer.tracking.step_metrics import group_metrics, is_spanning


def example_groups() -> list[TrajectoryGroup]:
    """Versions 4 and 5 in one trajectory; a masked token of version 2, which staleness must not see; a solved group."""
    crossing = make_trajectory(
        [1, 2, 3],
        [7, 8, 9, 10],
        loss_mask=[False, True, True, True],
        spans=(VersionSpan(0, 1, 2), VersionSpan(1, 2, 4), VersionSpan(2, 4, 5)),
        reward=1.0,
        cached_tokens=2,
    )
    cut = make_trajectory([1, 2, 3], [7, 8], spans=(VersionSpan(0, 2, 5),), finish_reason="length")
    solved = make_trajectory([1], [9, 9], spans=(VersionSpan(0, 2, 6),), reward=1.0)
    return [make_group(30, [crossing, cut]), make_group(31, [solved, solved])]


def example_advantages() -> list[FloatArray]:
    return [np.array([0.7, -0.7], np.float32), np.zeros(2, np.float32)]


def test_metrics_of_a_step_by_hand() -> None:
    metrics = group_metrics(example_groups(), example_advantages(), global_steps=6, update_interval=1)
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 3 / 4,
            "critic/rewards/mean": 3 / 4,
            "critic/rewards/max": 1,
            "critic/rewards/min": 0,
            "critic/advantages/mean": 0,
            "critic/advantages/max": 0.7,
            "critic/advantages/min": -0.7,
            "rollout/zero_variance_groups": 1 / 2,
            "rollout/solve_all": 1 / 2,
            "rollout/solve_none": 0,
            "response_length/mean": (4 + 2 + 2 + 2) / 4,
            "response_length/max": 4,
            "response_length/clip_ratio": 1 / 4,
            "prompt_length/mean": (3 + 3 + 1 + 1) / 4,
            "rollout/prefix_cached_tokens": 2 / 4,
            "perf/tokens": 10 + 8,
            # Trained tokens are of versions 4, 5, 5 / 5, 5 / 6, 6 / 6, 6, at step 6.
            "staleness/mean": (2 + 1 + 1 + 1 + 1) / 9,
            "staleness/max": 2,
            "staleness/min": 0,
            "staleness/spanning_trajectories": 1 / 4,
            "staleness/versions_per_trajectory_max": 3,
        }
    )


@pytest.mark.parametrize(("reward", "all_right", "none_right"), [(1.0, 1, 0), (0.0, 0, 1), (0.5, 0, 0)])
def test_groups_that_teach_nothing(reward: float, all_right: float, none_right: float) -> None:
    trajectories = [make_trajectory([1], [2], reward=reward)] * 2
    learning = [make_trajectory([1], [2], reward=float(index)) for index in range(2)]
    groups = [make_group(0, trajectories), make_group(1, trajectories), make_group(2, learning)]
    advantages = [np.zeros(2, np.float32)] * 2 + [np.array([-0.7, 0.7], np.float32)]
    metrics = group_metrics(groups, advantages, global_steps=0, update_interval=1)
    assert metrics["rollout/zero_variance_groups"] == pytest.approx(2 / 3)
    assert metrics["rollout/solve_all"] == pytest.approx(2 / 3 * all_right)
    assert metrics["rollout/solve_none"] == pytest.approx(2 / 3 * none_right)


def test_what_is_learned_and_what_the_reward_said_are_two_metrics() -> None:
    """A solved group stays solved whatever the lengths, and trajectories without a reward count nowhere."""
    late = [make_trajectory([1], [2], reward=1.0, overlong_penalty=penalty) for penalty in (0.0, -0.5)]
    failed = make_trajectory([1], [2], error="ValueError: no number")
    groups = [make_group(0, [*late, failed]), make_group(1, [failed] * 3)]
    metrics = group_metrics(groups, [np.zeros(3, np.float32)] * 2, global_steps=0, update_interval=1)
    assert metrics["critic/score/mean"] == 1
    assert (metrics["critic/rewards/mean"], metrics["critic/rewards/min"]) == (0.75, 0.5)
    assert (metrics["rollout/solve_all"], metrics["rollout/solve_none"]) == (0.5, 0)
    nothing = group_metrics(groups[1:], [np.zeros(3, np.float32)], global_steps=0, update_interval=1)
    assert (nothing["critic/score/mean"], nothing["critic/rewards/max"], nothing["rollout/solve_none"]) == (0, 0, 0)


def test_staleness_is_counted_in_updates_of_the_replicas() -> None:
    groups = [make_group(0, [make_trajectory([1], [2, 3], spans=(VersionSpan(0, 1, 0), VersionSpan(1, 2, 4)))])]
    metrics = group_metrics(groups, [np.ones(1, np.float32)], global_steps=7, update_interval=4)
    assert (metrics["staleness/max"], metrics["staleness/min"], metrics["staleness/mean"]) == (1, 0, 0.5)


def test_a_step_whose_tokens_are_all_masked_has_no_staleness() -> None:
    groups = [make_group(0, [make_trajectory([1], [2], loss_mask=[False])])]
    metrics = group_metrics(groups, [np.zeros(1, np.float32)], global_steps=9, update_interval=1)
    assert (metrics["staleness/max"], metrics["staleness/min"], metrics["staleness/mean"]) == (0, 0, 0)


def test_spanning_is_about_versions_not_about_spans() -> None:
    assert not is_spanning(make_trajectory([1], [2, 3], spans=(VersionSpan(0, 1, 5), VersionSpan(1, 2, 5))))
    assert is_spanning(make_trajectory([1], [2, 3], spans=(VersionSpan(0, 1, 4), VersionSpan(1, 2, 5))))
    assert not is_spanning(make_trajectory([1], [], spans=(), finish_reason="abort"))


@dataclass
class Screen:
    """A console that writes down what it is shown."""

    events: list[str] = field(default_factory=list)

    def stage(self, text: str) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None:
        self.events.append(f"step {global_steps} {metrics['timing_s/step']:g}")

    def evaluation(self, global_steps: int, accuracy: float) -> None:
        self.events.append(f"evaluation {global_steps} {accuracy:g}")


@dataclass(frozen=True)
class Evaluated:
    accuracy: float
    mean_response_tokens: float = 11.5
    num_prompts: int = 256
    versions: tuple[int, ...] = (0,)
    pinned: bool = True
    metrics: dict[str, float] = field(default_factory=dict)


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
        "prompt": "prompt 30",
        "response": "7 8 9 10",
        "ground_truth": "30",
        "reward": 1.0,
        "overlong_penalty": 0.0,
        "error": None,
        "advantage": 0.7,
        "versions": [[0, 1, 2], [1, 2, 4], [2, 4, 5]],
        "finish_reason": "stop",
        "replica": "replica-0",
    }
    assert [line["advantage"] for line in lines] == [0.7, -0.7, 0.0, 0.0]
