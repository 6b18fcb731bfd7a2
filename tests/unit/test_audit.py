"""What a run has trained, as its own records tell."""

import io
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from rollout.types import TrajectoryGroup
from scripts.audit import Audit, ascends, audit
from tests.fakes import make_group
from trainer.console import PlainConsole
from trainer.recorder import RunRecorder
from trainer.tracking import Tracker


def record(run_dir: Path, *steps: list[TrajectoryGroup]) -> None:
    recorder = RunRecorder(run_dir, Tracker([]), PlainConsole(len(steps), io.StringIO()))
    metrics = defaultdict[str, float](lambda: 1.0)
    for number, groups in enumerate(steps, start=1):
        recorder.record_step(number, metrics, groups, [np.zeros(len(g.trajectories), np.float32) for g in groups])


def test_what_was_lost_trained_twice_descended_and_was_stale_is_counted(tmp_path: Path) -> None:
    late = [make_group(4, 2, 3, group_size=2), make_group(1, 3, 3)]
    record(tmp_path, [make_group(0, 0), make_group(1, 0, 0)], [make_group(2, 0, 1)], [make_group(3, 2, 1)], late)
    assert audit(tmp_path) == Audit(
        steps=4,
        trajectories=7,
        prompts=5,
        lost=0,
        twice=1,
        missing_steps=0,
        descending_versions=1,
        max_staleness=1,
    )


@pytest.mark.parametrize(
    ("versions", "expected"), [([], True), ([3], True), ([3, 3, 5], True), ([3, 5, 4], False), ([6, 4], False)]
)
def test_versions_ascend_where_none_is_older_than_the_one_before(versions: list[int], expected: bool) -> None:
    assert ascends(versions) == expected
