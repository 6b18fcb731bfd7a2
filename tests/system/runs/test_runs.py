"""A whole run, started as a user starts it, and what it leaves behind."""

import json
import re
from pathlib import Path

import httpx
import pytest

from scripts.observe.events import EventReader
from scripts.observe.run import Run as RunReader
from scripts.observe.view import RunView
from scripts.timeline import TRACE_FILE, write_trace
from tests.support.browser import find_browser, opened_browser
from tests.support.page import SCREENS, served, show
from tests.support.whole_runs import SIZES, START_DEADLINE_S, Run, check_training, started, trained
from trainer.tracking.metric_list import describe, metric_list
from trainer.tracking.sinks import read_metrics

CLOCK_ERROR_S = 0.05
STEPS, EVALUATED = 60, 30
"""Enough steps after the evaluation that its replica is back long before the last prompts are given out."""
SAMPLES = 24
"""Enough to evaluate that several steps pass meanwhile, also on a machine that is busy."""


@pytest.mark.timeout(1200)
def test_a_run_leaves_everything_a_user_looks_for(tmp_path: Path) -> None:
    """Two replicas, a real warm-up, staleness 2: counts, versions and files."""
    with started(
        tmp_path,
        *SIZES,
        f"trainer.total_steps={STEPS}",
        f"trainer.eval_every={EVALUATED}",
        "rollout.num_replicas=2",
        "model.warmup_steps=60",
        f"model.cache_dir={tmp_path / 'cache'}",
        "rollout.max_response_tokens=64",
        f"evaluation.samples={SAMPLES}",
        "evaluation.temperature=1.0",
        "dashboard=true",
    ) as run:
        check_page_beside(run)
        assert run.wait_for_end(2 * START_DEADLINE_S) == 0, run.output.read_text()
        assert run.survivors() == []
        summary = json.loads((run.run_dir / "summary.json").read_text())
        assert summary["steps"] == STEPS
        assert summary["trajectories"] == summary["trajectories_started"] == STEPS * 4 * 8
        assert summary["engine_requests"] == summary["trajectories_started"]
        assert summary["aborted"] == summary["restarted"] == 0
        assert summary["spanning_trajectories"] > 0
        assert 0 < summary["max_token_staleness"] <= summary["max_staleness"] == 2
        assert 0 <= summary["accuracy_before"] <= 1 and 0 <= summary["accuracy_after"] <= 1
        assert 0 < summary["pause_ms_p50"] <= summary["pause_ms_p99"]
        check_files(run)
        check_pinned_evaluation(run)
        metrics = read_metrics(run.run_dir / "metrics.jsonl")
        assert [record["step"] for record in metrics if "eval/accuracy" in record] == [0, EVALUATED, STEPS]
        steps = [record for record in metrics if "critic/rewards/mean" in record]
        assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
        for record in steps:
            assert record["staleness/max"] <= 2
            assert record["actor/grad_norm"] >= 0
        check_metric_list(metrics, steps)
        check_events(run)
        check_page_afterwards(run, tmp_path / "profile")


def check_page_beside(run: Run) -> None:
    """Check that dashboard=true prints the address of a page that shows the run while it trains."""
    run.wait_for("dashboard of ", START_DEADLINE_S)
    (line,) = [line for line in run.output.read_text().splitlines() if "dashboard of " in line]
    address = line.rpartition(" ")[2]
    assert not httpx.get(f"{address}api/steps", params={"run": "run"}).json()["ended"]


def check_page_afterwards(run: Run, profile: Path) -> None:
    """The folder alone shows the whole run on every screen."""
    if find_browser() is None:
        return
    last = trained(run)[-1][0]
    with served([run.run_dir]) as address, opened_browser(profile) as tab:
        texts = {screen: show(tab, address, screen) for screen in SCREENS}
        text = show(tab, address, f"trajectory?step={STEPS}&ordinal={last['ordinal']}&index={last['index']}")
        assert tab.errors == []
    assert f"trained by step {STEPS} on v{STEPS - 1}" in text
    assert f"v{STEPS}" in texts["fleet"] and "The run has ended." in texts["fleet"]
    assert "it evaluates" in texts["fleet"], "why a replica was away"
    assert re.match(rf"Timeline, steps {STEPS - 2} to {STEPS}.*newest(v\d+)+", texts["timeline"])
    assert "num_replicas: 2" in texts["files"] and f"Step {STEPS} took" in texts["anatomy"]


def check_events(run: Run) -> None:
    """Every trajectory, step and update is there, on one clock, with the versions of the records."""
    reader, view = EventReader(run.run_dir), RunView()
    for stamped in reader:
        view.add(stamped)
    assert (reader.num_damaged, reader.num_unknown, view.num_dropped) == (0, 0, 0)
    assert view.ended is not None and view.ended.exit_code == 0 and sorted(view.steps) == list(range(STEPS + 1))
    lines = [line for step in trained(run) for line in step]
    versions = sorted(sorted({version for _, _, version in line["sequences"][0]["versions"]}) for line in lines)
    turns = [turn for group in view.groups.values() for one in group.trajectories.values() for turn in one.turns]
    assert sorted([version for _, version in turn.borders] for turn in turns) == versions
    assert {turn.replica for turn in turns} == {"replica-0", "replica-1"}
    assert all(turn.first_token is not None and turn.end is not None for turn in turns)
    for group in view.groups.values():
        assert group.claimed is not None and group.ready is not None and group.trained is not None
        for turn in (turn for one in group.trajectories.values() for turn in one.turns):
            assert turn.end is not None and turn.start < turn.end
            assert group.claimed - CLOCK_ERROR_S < turn.start and turn.end < group.ready + CLOCK_ERROR_S
    for number in range(1, STEPS + 1):
        step = view.steps[number]
        assert step.recorded is not None and step.published[0][1] > 0 and len(step.ordinals) == 4
        pauses = [updates[number].pause_s for updates in view.updates.values() if number in updates]
        assert pauses and all(pause is not None and pause > 0 for pause in pauses)
    loads = [sample.load.kv_usage for samples in view.loads.values() for sample in samples]
    assert loads and all(usage is not None and 0 <= usage < 8 for usage in loads)
    assert view.evaluations[EVALUATED].accuracy is not None
    assert (run.run_dir / f"evaluations/step_{EVALUATED:06d}.jsonl").exists()
    assert write_trace(RunReader.open(run.run_dir), run.run_dir / TRACE_FILE) > 3 * len(lines)


def check_metric_list(records: list[dict[str, float]], steps: list[dict[str, float]]) -> None:
    """The list of metrics is complete, and what it says of every step is in every step."""
    recorded = {key for record in records for key in record} - {"step", "time"}
    assert {key for key in recorded if describe(key) is None} == set()
    always = [entry for entry in metric_list() if not entry.when]
    assert {entry.name for entry in always} - recorded == set()
    every_step = {entry.name for entry in always if entry.heading not in ("Evaluation", "Learning")}
    assert all(every_step <= record.keys() for record in steps)
    assert {"weight_sync/pause_ms", "checkpoint/seconds", f"val/avg@{SAMPLES}"} <= recorded


def check_pinned_evaluation(run: Run) -> None:
    """Check that replica-1 held its version until its evaluation was over, beside updates, and was then trained with
    again."""
    records = read_metrics(run.run_dir / "metrics.jsonl")
    place = [("eval/accuracy" in record, record["step"]) for record in records].index((True, EVALUATED))
    before = [record for record in records[:place] if record["step"] > EVALUATED]
    assert len(before) >= 2, "steps and updates went on meanwhile"
    assert all("weight_sync/pause_ms" in record for record in before)
    # The step after EVALUATED may have asked the fleet before EVALUATED was settled, which starts the evaluation.
    assert before[1]["rollout/replicas_ready"] == 1 and records[-2]["rollout/replicas_ready"] == 2
    assert {key: records[place][f"eval/{key}"] for key in ("pinned", "num_versions", "min_version", "max_version")} == {
        "pinned": 1,
        "num_versions": 1,
        "min_version": EVALUATED,
        "max_version": EVALUATED,
    }
    lines = [line for step in trained(run)[EVALUATED:] for line in step]
    assert any(line["replica"] == "replica-1" and line["sequences"][0]["versions"][0][2] > EVALUATED for line in lines)
    output = run.output.read_text()
    assert "replica-1 is out of service: it evaluates" in output and "replica-1 is back in service" in output


def check_files(run: Run) -> None:
    for name in ("config.yaml", "metrics.jsonl", "curve.png", "driver.log", "logs/replica-0.log", "logs/replica-1.log"):
        assert (run.run_dir / name).is_file(), name
    assert (run.run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run.run_dir / "wandb").glob("offline-run-*"))
    assert (run.run_dir.parent / "latest").resolve() == run.run_dir.resolve()
    check_training(run, STEPS)
    assert "INFO" not in run.output.read_text(), "engine logs belong into files"
