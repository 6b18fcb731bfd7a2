"""A recorded run that is as it must be, and each way in which its records can be wrong."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from configs.schema import (
    AlgorithmConfig,
    Config,
    EvaluationConfig,
    RolloutConfig,
    StalePolicy,
    WeightSyncConfig,
)
from rollout.replica.sampled_log import SampledLog
from rollout.sampled_tokens import SAMPLED, new_record
from rollout.types import (
    DiscardReason,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from scripts.observe.audit import audit
from scripts.observe.files import RunError
from tests.support.changed_runs import change_first_line, change_lines
from tests.support.paths import ROOT
from tests.support.recorded_runs import (
    CONFIG,
    GROUP_SIZE,
    ORIGIN,
    PROMPTS,
    STEPS,
    GroupsOf,
    evaluation,
    groups_of,
    record,
    sample,
    take_steps,
)
from tests.support.recordings import Screen
from tests.support.sequences import only, with_sequence
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.set_aside import SetAside
from trainer.tracking.sinks import JsonlSink, Tracker


def test_of_a_whole_run_nothing_is_found(tmp_path: Path) -> None:
    record(tmp_path)
    found = audit(tmp_path)
    assert found.findings == ()
    assert (found.finished, found.steps, found.trajectories, found.prompts) == (True, 4, 32, 8)
    assert (found.discarded, found.evaluations, found.lost, found.twice) == (1, 2, 0, 0)
    assert (found.missing_steps, found.max_staleness) == (0, 1)


def test_trained_tokens_are_held_against_those_that_were_sampled(tmp_path: Path) -> None:
    record(tmp_path)
    found = audit(tmp_path)
    assert (found.tokens.trained, found.tokens.unchecked) == (64, 64)
    assert "0 trained tokens held against what was sampled, 64 without a record to check them by" in found.sentence
    sample(tmp_path, STEPS - 1)
    found = audit(tmp_path)
    assert (found.tokens.sampled, found.tokens.never_sampled, found.tokens.unchecked) == (48, 16, 0)
    (finding,) = found.findings
    assert finding.startswith("16 tokens that no replica sampled were trained, the first: step 4, prompt 7, traj")
    shutil.rmtree(tmp_path / SAMPLED)
    sample(tmp_path)
    found = audit(tmp_path)
    assert (found.findings, found.tokens.unchecked, found.tokens.delivered_fraction) == ((), 0, 1.0)
    assert "64 trained tokens held against what was sampled; a chain of 4 steps" in found.sentence


def test_what_a_run_took_over_from_another_folder_is_unchecked(tmp_path: Path) -> None:
    """Its step 3 trains tokens of versions 1 and 2, step 4 of 2 and 3, of which only version 3 is new."""
    finish(resumed(tmp_path, 2, in_new=True), 3)
    SampledLog(new_record(tmp_path, "r0"))
    found = audit(tmp_path)
    assert (found.tokens.trained, found.tokens.unchecked, found.tokens.never_sampled) == (32, 24, 8)


# -- legitimate runs ---------------------------------------------------------------------------------------------------


def changed_groups(change: Callable[[Trajectory, int], Trajectory]) -> GroupsOf:
    """The groups of each step with `change(trajectory, step)` in place of each trajectory."""

    def groups(step: int) -> list[TrajectoryGroup]:
        return [replace(g, trajectories=tuple(change(t, step) for t in g.trajectories)) for g in groups_of(step)]

    return groups


def multi_turn(trajectory: Trajectory, step: int) -> Trajectory:
    """A token, one of an environment, and another token."""
    version = only(trajectory).spans[-1].global_steps
    return with_sequence(
        trajectory,
        response_ids=np.zeros(3, np.int32),
        rollout_logprobs=np.zeros(3, np.float32),
        loss_mask=np.array([True, False, True]),
        spans=(VersionSpan(0, 1, version), VersionSpan(2, 3, version)),
    )


def first_masked(trajectory: Trajectory, step: int) -> Trajectory:
    return with_sequence(trajectory, loss_mask=np.array([False, True]))


def stale_masked(trajectory: Trajectory, step: int) -> Trajectory:
    stale = VersionSpan(0, 1, 0), VersionSpan(1, 2, step - 1)
    return with_sequence(trajectory, loss_mask=np.array([False, True]), spans=stale)


def of_even_versions(trajectory: Trajectory, step: int) -> Trajectory:
    return with_sequence(trajectory, spans=(VersionSpan(0, 2, (step - 1) // 2 * 2),))


def link_of(step: int, run_dir: Path) -> str:
    lines = [json.loads(line) for line in (run_dir / "proof.jsonl").read_text().splitlines()]
    return next(line["link"] for line in lines if line["global_steps"] == step)


def resumed(run_dir: Path, at: int, before: Config = CONFIG, *, in_new: bool = False) -> RunRecorder:
    """A run of CONFIG that goes on from a step of another, after which the other was killed."""
    old = run_dir / "old" if in_new else run_dir
    record(old, before, finished=False)
    first = RunRecorder(old, Tracker([]), Screen())
    first.counts.steps, first.counts.trajectories = at, at * PROMPTS * GROUP_SIZE
    first.counts.accuracies, first.counts.training_seconds, first.counts.pause_ms = [(0, 0.5)], 1.0, [1.0]
    first.counts.max_token_staleness = 1.0 if at > 1 else 0.0
    first.chain.link = link_of(at, old)
    aside = SetAside(run_dir, at)
    aside.move(run_dir / "config.yaml")
    second = RunRecorder(run_dir, Tracker([JsonlSink(run_dir / "metrics.jsonl")]), Screen(), record_tokens=True)
    second.restore(first.state(), at, aside)
    OmegaConf.save(OmegaConf.structured(CONFIG), run_dir / "config.yaml")
    second.record_beginning(at, replace(ORIGIN, weights=f"{at:016x}", continues="checkpoints/step"))
    return second


def finish(recorder: RunRecorder, first: int) -> None:
    take_steps(recorder, first, STEPS)
    recorder.record_evaluation(STEPS, evaluation(STEPS))
    recorder.certified(lambda: recorder.write_summary({"filtered_groups": 1}))


def with_evaluation_made_up(run_dir: Path) -> None:
    """The process before, whose config wants another number of samples, was killed while it evaluated version 2."""
    second = resumed(run_dir, 2, replace(CONFIG, evaluation=EvaluationConfig(samples=3, temperature=1.0)))
    second.counts.accuracies = []
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[1:]))
    second.record_evaluation(0, evaluation(0, num_samples=3))
    second.record_evaluation(2, evaluation(2))
    finish(second, 3)


def with_files_of_a_person(run_dir: Path) -> None:
    """They are moved by no resume, and no finding."""
    second = resumed(run_dir, 2)
    for folder in ("trajectories", "discarded", "evaluations"):
        (run_dir / folder / "step_000002.copy.jsonl").write_text("mine\n")
    second.restore(second.state(), 2, SetAside(run_dir, 2))
    (run_dir / "set_aside" / "mine").mkdir()
    (run_dir / "set_aside" / "mine" / "config.yaml").write_text("mine")
    finish(second, 3)


def after_an_older_version(run_dir: Path) -> None:
    second = resumed(run_dir, 2)
    (earlier,) = (run_dir / "set_aside").glob("*/config.yaml")
    config = OmegaConf.load(earlier)
    del config.trainer["record_tokens"]
    OmegaConf.save(config, earlier)
    (run_dir / "proof.jsonl").unlink()  # it wrote none, and its checkpoint has no link
    second.chain.link = second.chain.weights = ""
    second.record_beginning(2, replace(ORIGIN, continues="checkpoints/step_000002"))
    finish(second, 3)


LEGITIMATE: dict[str, Callable[[Path], object]] = {
    **{
        reason.name: partial(record, reason=reason, config=replace(CONFIG, rollout=RolloutConfig(stale_policy=policy)))
        for reason in DiscardReason
        for policy in [StalePolicy.drop if reason is DiscardReason.stale else StalePolicy.wait]
    },
    "several turns": partial(record, groups_of=changed_groups(multi_turn)),
    "an agent loop masks tokens of its own": partial(record, groups_of=changed_groups(first_masked)),
    "stale tokens are masked": partial(
        record,
        config=replace(CONFIG, rollout=RolloutConfig(stale_policy=StalePolicy.mask)),
        groups_of=changed_groups(stale_masked),
    ),
    "several steps per version": partial(
        record,
        config=replace(CONFIG, weight_sync=WeightSyncConfig(interval=2)),
        groups_of=changed_groups(of_even_versions),
    ),
    "resumed": lambda run_dir: finish(resumed(run_dir, 2), 3),
    "resumed at the last step in a new folder": lambda run_dir: finish(resumed(run_dir, STEPS, in_new=True), STEPS + 1),
    "an evaluation was made up": with_evaluation_made_up,
    "files of a person": with_files_of_a_person,
    "begun by an older version": after_an_older_version,
}


@pytest.mark.parametrize("recorded", LEGITIMATE.values(), ids=LEGITIMATE)
def test_a_legitimate_run_has_no_finding(recorded: Callable[[Path], object], tmp_path: Path) -> None:
    recorded(tmp_path)
    assert audit(tmp_path).findings == ()


def test_advantages_are_recomputed_after_a_skipped_step_and_not_of_it(tmp_path: Path) -> None:
    """What is logged is the number of skipped steps so far. The first is skipped here."""
    record(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"actor/skipped_steps": 0.0', '"actor/skipped_steps": 1.0'))
    for step in (1, 3):
        lines_of(step, tmp_path)[0].write_text(
            re.sub(r'"advantage":[-.\d]+', '"advantage":0.25', lines_of(step, tmp_path)[0].read_text())
        )
    found = [finding for finding in audit(tmp_path).findings if "its advantage is" in finding]
    assert len(found) == 1 and found[0].startswith("step 3, prompt 5, trajectory 0: its advantage is 0.25")


def test_an_earlier_config_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    second = resumed(tmp_path, 2)
    (earlier,) = (tmp_path / "set_aside").glob("*/config.yaml")
    earlier.write_text("trainer: {total")
    finish(second, 3)
    (finding,) = audit(tmp_path).findings
    assert finding.startswith("an earlier config: ") and str(earlier.parent) in finding


def test_a_run_that_was_killed_is_audited_as_far_as_it_came(tmp_path: Path) -> None:
    record(tmp_path, finished=False)
    (tmp_path / "trajectories" / "step_000002.jsonl").unlink()
    found = audit(tmp_path)
    assert (found.finished, found.steps, found.missing_steps) == (False, 3, 1)
    assert len(found.findings) == 1 and "step 2 has no records" in found.findings[0]


# -- damage ------------------------------------------------------------------------------------------------------------


def lines_of(step: int, run_dir: Path) -> tuple[Path, list[str]]:
    path = run_dir / "trajectories" / f"step_{step:06d}.jsonl"
    return path, path.read_text().splitlines(keepends=True)


def change_step(step: int, change: Callable[[list[str]], object]) -> Callable[[Path], None]:
    return change_lines(f"trajectories/step_{step:06d}.jsonl", change)


def change_record(step: int, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    """Change the first record of a step by what `change` returns of it."""

    def changed(line: str) -> str:
        return json.dumps((record := json.loads(line)) | change(record)) + "\n"

    return change_first_line(f"trajectories/step_{step:06d}.jsonl", changed)


def change_sequence(step: int, **values: Any) -> Callable[[Path], None]:
    """Change the sequence of the first record of a step."""
    return change_record(step, lambda record: {"sequences": [record["sequences"][0] | values]})


def change_json(name: str, **values: Any) -> Callable[[Path], None]:
    def do(run_dir: Path) -> None:
        (run_dir / name).write_text(json.dumps(json.loads((run_dir / name).read_text()) | values))

    return do


def move_record(run_dir: Path) -> None:
    """A trajectory of step 1 appears in step 4 instead."""
    first, lines = lines_of(1, run_dir)
    moved = lines.pop()
    first.write_text("".join(lines))
    last, lines = lines_of(4, run_dir)
    last.write_text("".join([*lines, moved]))


def copy_step(run_dir: Path) -> None:
    path, lines = lines_of(2, run_dir)
    path.with_name("step_000003.jsonl").write_text("".join(lines))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "the last step is empty": (change_step(4, list.clear), "step 4 has 0 prompts"),
    "three of four trajectories": (change_step(2, lambda lines: lines.__delitem__(slice(3))), "trajectories [3]"),
    "a whole group": (change_step(2, lambda lines: lines.__delitem__(slice(4))), "step 2 has 1 prompts"),
    "a line twice": (change_step(2, lambda lines: lines.append(lines[-1])), "1 prompts were trained twice: 4"),
    "a trajectory in another step": (move_record, "trained twice: 1"),
    "a step that is a copy of another": (copy_step, "2 prompts were neither trained nor discarded: 5, 6"),
    "the last line is cut": (change_step(3, lambda lines: lines.append(lines.pop()[:-9])), "line 8 is cut"),
    "a line is no record": (change_step(3, lambda lines: lines.insert(0, "{}\n")), "line 1 is damaged"),
    "a line nests deep": (change_step(3, lambda lines: lines.insert(0, "[" * 99_999 + "\n")), "line 1 is damaged"),
    "a step file": (lambda run_dir: lines_of(2, run_dir)[0].unlink(), "step 2 has no records"),
    "the first step file": (lambda run_dir: lines_of(1, run_dir)[0].unlink(), "step 1 has no records"),
    "a step too many": (
        lambda run_dir: (run_dir / "trajectories" / "step_000005.jsonl").write_text(""),
        "not taken: 5",
    ),
    "versions descend": (change_sequence(3, versions=[[0, 1, 2], [1, 2, 1]]), "the versions [2, 1] descend"),
    "a version of the future": (change_sequence(3, versions=[[0, 1, 1], [1, 2, 3]]), "a token is of version 3"),
    "an older version": (change_sequence(4, versions=[[0, 2, 0]]), "step 4: staleness/max was 1, is 3"),
    "beyond the bound": (change_sequence(4, versions=[[0, 2, 0]]), "3 versions old, rollout.max_staleness=2"),
    "spans beyond the tokens": (change_sequence(3, versions=[[0, 1, 1], [1, 9, 2]]), "do not fit 2 tokens"),
    "spans that overlap": (change_sequence(3, versions=[[0, 2, 1], [1, 2, 2]]), "do not fit 2 tokens"),
    "another row": (change_record(3, lambda record: {"row": 7}), "prompt 5 is of the rows 5, 7 of the data"),
    "another reward": (change_record(3, lambda record: {"reward": 0.5}), "critic/score/mean was 0.5, is 0.5625"),
    "another length": (change_sequence(3, response_tokens=9), "response_length/mean was 2, is 2.875"),
    "another group_size": (
        lambda run_dir: OmegaConf.save(
            OmegaConf.structured(replace(CONFIG, algorithm=AlgorithmConfig(group_size=8))), run_dir / "config.yaml"
        ),
        "algorithm.group_size=8",
    ),
    "no tokens": (lambda run_dir: (run_dir / "trajectories" / "step_000002.npz").unlink(), "step_000002.npz cannot"),
    "half of the tokens": (
        lambda run_dir: (run_dir / "trajectories" / "step_000002.npz").write_bytes(b"PK\3\4"),
        "step_000002.npz cannot be read",
    ),
    "no metrics": (lambda run_dir: (run_dir / "metrics.jsonl").unlink(), "metrics.jsonl cannot be read"),
    "a line of metrics": (
        change_lines("metrics.jsonl", lambda lines: lines.pop(2)),
        "step 2 has 0 lines in metrics.jsonl",
    ),
    "metrics that are cut": (
        lambda run_dir: (run_dir / "metrics.jsonl").open("a").write('{"step": 5'),
        "metrics.jsonl: the last line is cut",
    ),
    "a discarded group": (lambda run_dir: (run_dir / "discarded" / "step_000001.jsonl").unlink(), "discarded: 3"),
    "samples of an evaluation": (
        change_lines("evaluations/step_000004.jsonl", lambda lines: lines.pop(0)),
        "has 5 samples, must be 6",
    ),
    "an evaluation": (
        lambda run_dir: (run_dir / "evaluations" / "step_000000.jsonl").unlink(),
        "the evaluation of version 0 has no records",
    ),
    "the number of steps": (change_json("summary.json", steps=3), "summary.json says steps=3, the records 4"),
    "the accuracy": (change_json("summary.json", accuracy_after=0.9), "accuracy_after=0.9, the records 0.5"),
    "the staleness": (change_json("summary.json", max_token_staleness=0), "max_token_staleness=0, the records 1"),
    "a count that is none": (change_json("summary.json", recorded_since="x"), "recorded_since='x', must be a whole"),
    "half a summary": (lambda run_dir: (run_dir / "summary.json").write_text('{"st'), "summary.json is damaged"),
}


@pytest.mark.parametrize(("damage", "finding"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_wrong_with_the_records_is_found(
    damage: Callable[[Path], object], finding: str, tmp_path: Path
) -> None:
    record(tmp_path)
    damage(tmp_path)
    findings = audit(tmp_path).findings
    assert any(finding in found for found in findings), findings


# -- several processes, and no run -------------------------------------------------------------------------------------


def test_steps_are_audited_by_the_config_under_which_they_were_taken(tmp_path: Path) -> None:
    """The run goes on from step 2 with groups of another size."""
    second = resumed(tmp_path, 2)
    larger = replace(CONFIG, algorithm=AlgorithmConfig(group_size=GROUP_SIZE + 1))
    OmegaConf.save(OmegaConf.structured(larger), tmp_path / "config.yaml")
    take_steps(second, 3, 4)
    assert sorted(audit(tmp_path).findings) == [
        f"step {step}: prompt {ordinal} has trajectories [0, 1, 2, 3], algorithm.group_size=5"
        for step, ordinal in ((3, 5), (3, 6), (4, 7), (4, 8))
    ]


def test_a_run_that_goes_on_in_a_new_folder_is_audited_from_there(tmp_path: Path) -> None:
    finish(resumed(tmp_path, 2, in_new=True), 3)
    found = audit(tmp_path)
    assert (found.findings, found.steps, found.lost) == ((), 2, 0)
    lines_of(3, tmp_path)[0].unlink()
    assert "step 3 has no records" in audit(tmp_path).findings[0]


@pytest.mark.parametrize("config", [None, "- a list", "trainer: {total_steps: 3}", "trainer: ["])
def test_a_folder_that_is_no_run_is_refused(config: str | None, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    with pytest.raises(RunError, match="holds no training run of this version"):
        audit(tmp_path)


@pytest.mark.slow
def test_the_command_exits_with_1_for_findings_and_for_what_is_no_run(tmp_path: Path) -> None:
    def ended(run_dir: Path, *options: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "scripts.audit", str(run_dir), *options]
        return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=60, check=False)

    record(tmp_path / "run")
    whole = ended(tmp_path / "run")
    assert (whole.returncode, json.loads(whole.stdout)["findings"]) == (0, []) and "; no findings\n" in whole.stderr
    summary = (tmp_path / "run" / "summary.json").read_text()
    (tmp_path / "run" / "summary.json").write_text("")
    damaged = ended(tmp_path / "run")
    assert damaged.returncode == 1 and damaged.stderr.startswith("audit: ") and json.loads(damaged.stdout)["findings"]
    for name in ("summary.json", "certificate.json"):
        (tmp_path / "run" / name).unlink()
    known = ended(tmp_path / "run", "--summary", text=summary)
    assert json.loads(known.stdout)["findings"] == ["certificate.json is missing"], "not a run that was killed"
    nothing = ended(tmp_path / "nothing")
    assert nothing.returncode == 1 and "no such folder" in nothing.stderr and "Traceback" not in nothing.stderr
