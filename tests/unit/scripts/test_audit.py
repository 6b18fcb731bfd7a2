"""What a run has trained, as its own records tell; and a log that is as it must be, with each way to break it."""

import io
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.types import TrajectoryGroup
from scripts.audit import Audit, audit, configured_interval
from tests.support.fakes import make_group
from trainer.tracking.console import PlainConsole
from trainer.tracking.recorder import TRAJECTORIES, RunRecorder
from trainer.tracking.sinks import Tracker


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
        newer_versions=0,
        max_staleness=1,
    )


# -- by hand -----------------------------------------------------------------------------------------------------------


Log = dict[int, list[dict[str, Any]]]
"""Step -> its records."""


def whole_log() -> Log:
    """Four steps of two prompts with two trajectories each. Step s trains with weights s - 1; the tokens are of those
    and of the ones before."""

    def trained(step: int, ordinal: int, index: int) -> dict[str, Any]:
        return {"ordinal": ordinal, "index": index, "versions": [[0, 3, max(0, step - 2)], [3, 5, step - 1]]}

    return {
        step: [trained(step, 2 * (step - 1) + prompt, index) for prompt in range(2) for index in range(2)]
        for step in range(1, 5)
    }


def audited(log: Log, run_dir: Path) -> Audit:
    folder = run_dir / TRAJECTORIES
    folder.mkdir()
    for step, records in log.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"step_{step:06d}.jsonl").write_text(lines)
    return audit(run_dir)


WHOLE = {
    "steps": 4,
    "trajectories": 16,
    "prompts": 8,
    "lost": 0,
    "twice": 0,
    "missing_steps": 0,
    "descending_versions": 0,
    "newer_versions": 0,
    "max_staleness": 1,
}


def test_staleness_is_in_versions(tmp_path: Path) -> None:
    """With an update every third step; step 7 trains a token of version 0, which is two versions behind."""
    record = {"ordinal": 0, "index": 0, "versions": [[0, 3, 0], [3, 5, 3]]}
    audited({7: [record]}, tmp_path)
    assert [audit(tmp_path, interval=interval).max_staleness for interval in (1, 3)] == [6, 2]
    (tmp_path / "config.yaml").write_text("weight_sync:\n  interval: 3\n")
    assert configured_interval(tmp_path) == 3


BREAK: dict[str, tuple[Callable[[Log], object], dict[str, int]]] = {
    "nothing": (lambda log: None, {}),
    "a prompt is lost": (lambda log: log.update({2: log[2][2:]}), {"trajectories": 14, "prompts": 7, "lost": 1}),
    "trained in two steps": (
        lambda log: log[4].extend(log[1][:2]),
        {"trajectories": 18, "twice": 1, "max_staleness": 3},
    ),
    "shared between two steps": (lambda log: log[4].append(log[1].pop()), {"twice": 1, "max_staleness": 3}),
    "trained twice in a step": (lambda log: log[3].extend(log[3][2:]), {"trajectories": 18, "twice": 1}),
    "a step is lost": (lambda log: log.update({5: log.pop(2)}), {"missing_steps": 1, "max_staleness": 4}),
    "descends": (lambda log: log[3][0].update(versions=[[0, 3, 2], [3, 5, 1]]), {"descending_versions": 1}),
    "foresees": (lambda log: log[3][0].update(versions=[[0, 3, 2], [3, 5, 3]]), {"newer_versions": 1}),
    "is stale": (lambda log: log[4][3].update(versions=[[0, 1, 0], [1, 5, 3]]), {"max_staleness": 3}),
}


@pytest.mark.parametrize(("change", "differs"), BREAK.values(), ids=BREAK)
def test_what_is_wrong_with_a_log_is_found(
    change: Callable[[Log], object], differs: dict[str, int], tmp_path: Path
) -> None:
    log = whole_log()
    change(log)
    assert asdict(audited(log, tmp_path)) == WHOLE | differs


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    audited(whole_log(), tmp_path)
    path = tmp_path / TRAJECTORIES / "step_000003.jsonl"
    path.write_text(path.read_text().replace('"index"', '"number"', 1))
    with pytest.raises(ValueError, match=r"step_000003\.jsonl:1: damaged record: KeyError\('index'\)"):
        audit(tmp_path)
