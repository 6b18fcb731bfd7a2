"""The audit's distance between what was trained and what was claimed, recomputed from the records alone."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from configs.schema import AlgorithmConfig, Config, EvaluationConfig, RolloutConfig, StalePolicy, TrainerConfig
from rollout.types import DiscardedGroup, DiscardReason, TrajectoryGroup
from scripts.observe.audit import Audit, audit
from scripts.observe.coverage import CoverageAudit, Terms, TrajectoryEnded, metrics_by_step
from tests.support.recordings import Screen
from tests.support.reference import make_group, make_trajectory
from trainer.advantages.estimators import group_advantages, grpo
from trainer.tracking.coverage import Coverage, make_coverage
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.sinks import METRICS_FILE, JsonlSink, Tracker
from trainer.tracking.step_metrics import group_metrics
from trainer.tracking.trajectories import TrajectoryRecord, discard_record, trajectory_records

GROUP_SIZE = 2
TERMS = Terms(group_size=GROUP_SIZE, stale_policy="drop", mask_truncated=False)


def group(ordinal: int, length: int = 2, tool_s: float = 0.0, **fields: object) -> TrajectoryGroup:
    trajectories = [replace(make_trajectory([1], [2] * length), tool_s=tool_s, **fields) for _ in range(GROUP_SIZE)]
    trajectories[0] = replace(trajectories[0], reward=1.0)
    return make_group(ordinal, trajectories)


def discarded(some: TrajectoryGroup, reason: DiscardReason) -> DiscardedGroup:
    trajectories = () if reason is DiscardReason.failed else some.trajectories
    return DiscardedGroup(prompt=some.prompt, reason=reason, trajectories=trajectories)


outcomes = st.sampled_from([None, *DiscardReason])
groups = st.tuples(st.integers(1, 5), st.integers(0, 3), st.sampled_from(["", "abort", "error", "both"]), outcomes)


@given(st.lists(groups, min_size=10, max_size=30))
def test_the_audit_and_the_run_agree(drawn: list[tuple[int, int, str, DiscardReason | None]]) -> None:
    """They share no code: one window of ten groups per ten steps of one group each."""
    run, records, logged = Coverage(window=10, group_size=GROUP_SIZE), CoverageAudit(1), {}
    for ordinal, (length, tool_s, what, reason) in enumerate(drawn):
        abort, error = {"finish_reason": "abort"}, {"error": "no reward"}
        fields = {"abort": abort, "error": error, "both": abort | error}.get(what, {})
        one, step = group(ordinal, length, tool_s, **fields), ordinal + 1
        if reason is None:
            run.take_trained([one])
            records.take_trained(step, ordinal, trajectory_records(one.prompt, one.trajectories, [0.0] * 2), TERMS)
        else:
            run.take_discarded(left := discarded(one, reason))
            record = discard_record(left, ordinal)
            records.take_discarded(step, ordinal, record.reason, ended(record.trajectories), TERMS)
        if metrics := run.metrics():
            logged[step] = metrics
    assert metrics_by_step(records.windows(finished=False)) == {
        step: pytest.approx(metrics) for step, metrics in logged.items()
    }


def ended(trajectories: list[TrajectoryRecord]) -> list[TrajectoryEnded]:
    return [msgspec.convert(asdict(trajectory), TrajectoryEnded) for trajectory in trajectories]


# -- whole runs --------------------------------------------------------------------------------------------------------

PROMPTS, STEPS, SLOW = 2, 10, 7
"""The run is one window of 20 prompts, unless a group is discarded: then it has one prompt more. SLOW is an ordinal."""


def config(policy: StalePolicy = StalePolicy.wait) -> Config:
    return Config(
        trainer=TrainerConfig(total_steps=STEPS, prompts_per_step=PROMPTS, record_tokens=False),
        algorithm=AlgorithmConfig(group_size=GROUP_SIZE),
        rollout=RolloutConfig(stale_policy=policy, max_staleness=STEPS),
        evaluation=EvaluationConfig(samples=1),
    )


def record(
    run_dir: Path, policy: StalePolicy, reason: DiscardReason | None, *, steps: int = STEPS, finished: bool = True
) -> Audit:
    """Record a run whose slow group is trained last, or discarded for a reason."""
    OmegaConf.save(OmegaConf.structured(config(policy)), run_dir / "config.yaml")
    tracker = Tracker([JsonlSink(run_dir / METRICS_FILE)])
    recorder = RunRecorder(run_dir, tracker, Screen(), coverage=make_coverage(config(policy)))
    recorder.counts.accuracies = [(0, 0.5)]
    slow = group(SLOW, 50, 1800.0)
    if reason is not None:
        recorder.record_discarded(discarded(slow, reason))
    fast = [group(ordinal) for ordinal in range(STEPS * PROMPTS + 1) if ordinal != SLOW]
    every = fast if reason is not None else [*fast[: STEPS * PROMPTS - 1], slow]
    for step in range(1, steps + 1):
        some = every[PROMPTS * (step - 1) : PROMPTS * step]
        rewards = [np.array([trajectory.reward for trajectory in group.trajectories]) for group in some]
        advantages = group_advantages(some, rewards, grpo, AlgorithmConfig(group_size=GROUP_SIZE))
        metrics = group_metrics(some, advantages, step - 1, 1)
        metrics |= {"timing_s/step": 1.0, "timing_s/elapsed": float(step), "weight_sync/pause_ms": 1.0}
        recorder.record_step(step, metrics, some, advantages)
    if finished:
        key = f"{reason.name}_groups" if reason is not None else "stale_groups"
        recorder.certified(lambda: recorder.write_summary({key: int(reason is not None)}))
    return audit(run_dir)


def test_a_run_that_trains_its_slow_group_last_leaves_nothing_out(tmp_path: Path) -> None:
    report = record(tmp_path, StalePolicy.wait, None)
    assert (report.findings, report.notes) == ((), ())
    assert (report.coverage.windows, report.coverage.claimed, report.coverage.left_out) == (1, 40, {})
    assert report.coverage.tool_s_distance == report.coverage.late_distance == 0
    assert "note" not in report.sentence


def test_a_policy_that_drops_is_told_of_and_is_no_finding(tmp_path: Path) -> None:
    report = record(tmp_path, StalePolicy.drop, DiscardReason.stale)
    assert report.findings == ()
    assert report.coverage.left_out == {"stale": 2}
    assert report.coverage.late_distance == report.coverage.length_distance == pytest.approx(0.05)
    (note,) = report.notes
    assert note == (
        "prompts 0 to 19: 2 of 40 trajectories were left out (2 stale), as rollout.stale_policy=drop says, and what "
        "was trained has a distance of 0.050 from what was claimed in length"
    )
    assert note in report.sentence


def test_a_group_that_is_dropped_where_the_trainer_was_to_wait_is_a_finding(tmp_path: Path) -> None:
    report = record(tmp_path, StalePolicy.wait, DiscardReason.stale)
    (finding,) = report.findings
    assert finding.startswith("prompts 0 to 19: 2 of 40 trajectories were left out (2 stale), and what was trained")
    assert report.notes == ()


@pytest.mark.parametrize(
    ("reason", "notes", "late"), [(DiscardReason.failed, 1, 0.05), (DiscardReason.filtered, 0, 0.0)]
)
def test_a_group_that_is_given_up_is_told_of_and_one_that_is_filtered_is_counted(
    tmp_path: Path, reason: DiscardReason, notes: int, late: float
) -> None:
    report = record(tmp_path, StalePolicy.wait, reason)
    assert report.findings == () and len(report.notes) == notes
    assert report.coverage.left_out == {reason.name: 2}
    assert report.coverage.length_distance == pytest.approx(0.05)
    assert report.coverage.late_distance == pytest.approx(late)


def test_a_run_that_was_killed_is_not_blamed_for_what_it_had_under_way(tmp_path: Path) -> None:
    report = record(tmp_path, StalePolicy.drop, None, steps=STEPS - 1, finished=False)
    assert (report.findings, report.notes, report.coverage.windows) == ((), (), 0)


def test_a_tool_time_that_is_altered_is_not_the_one_that_the_run_compared(tmp_path: Path) -> None:
    record(tmp_path, StalePolicy.drop, DiscardReason.stale)
    (path,) = (tmp_path / "discarded").iterdir()
    line = json.loads(path.read_text())
    for trajectory in line["trajectories"]:
        trajectory["tool_s"] = 0.0
    path.write_text(json.dumps(line) + "\n")
    assert "step 10: coverage/tool_s_distance was 0.05, is 0 in its records" in audit(tmp_path).findings
