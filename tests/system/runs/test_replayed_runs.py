"""Whole runs with engines, killed again and again: their records alone give the same weights, and other ones."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.observe.audit import audit
from scripts.observe.run import Run, named_runs
from tests.support.paths import ROOT
from tests.support.whole_runs import SIZES, START_DEADLINE_S, started, steps_of
from trainer.tracking.sinks import read_metrics

STEPS, NUM_KILLS = 60, 5
"""Enough steps that a quick machine is not done before the last kill. Checkpoints are of even steps: what came after
one is taken again."""
SOURCES = ("arithmetic", "agent", "search")


def replay(run_dir: Path, *words: str) -> tuple[Any, str]:
    command = [sys.executable, "-m", "scripts.replay", str(run_dir), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * START_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_run_that_was_killed_five_times_is_taken_again_to_the_bit(tmp_path: Path) -> None:
    """The default recipe in small. Its warm model is only in the run folder: the cache is gone after the first kill."""
    cache = tmp_path / "cache"
    overrides = [
        *SIZES,
        f"trainer.total_steps={STEPS}",
        "trainer.eval_every=0",
        "checkpoint.every=2",
        "model.warmup_steps=10",
        "rollout.reward=tests.support.rewards:length_parity",
        f"model.cache_dir={cache}",
        "resume=auto",
    ]
    for kill in (*range(NUM_KILLS), None):
        with started(tmp_path, *overrides) as run:
            if kill is None:
                assert run.wait_for_end(2 * START_DEADLINE_S) == 0, run.output.read_text()
            else:
                run.wait_for_count("  reward ", 4, 2 * START_DEADLINE_S)  # four steps of this process are shown
                time.sleep(0.1 * kill)
                run.process.send_signal(signal.SIGKILL)
                run.process.wait(30)
        shutil.rmtree(cache, ignore_errors=True)
    run_dir = tmp_path / "run"
    outcome, told = replay(run_dir)
    assert (outcome["steps"], outcome["equal"], outcome["equality_expected"]) == (STEPS, STEPS, True), told
    assert f"replay of run: all {STEPS} steps gave the run's weights, bit for bit" in told
    lines = [json.loads(line) for line in (run_dir / "proof.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "beginning" for line in lines) > 1
    assert lines[-1]["weights"] == outcome["weights"]
    assert len({line["weights"] for line in lines if line["kind"] == "step"}) > STEPS // 2, "something was learned"
    check_other_values(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_mixture_one_source_of_which_has_a_curriculum_is_taken_again_to_the_bit(tmp_path: Path) -> None:
    """Each source is a third of what is trained, and is evaluated by itself."""
    overrides = [
        *("model=chat", "recipe=mixture", *SIZES, "model.warmup_steps=60", f"model.cache_dir={tmp_path}/cache"),
        *("data.sources.arithmetic.data.curriculum.order=frontier", "data.sources.search.loss_coef=0.5"),
        *("trainer.total_steps=4", "checkpoint.every=2"),
    ]
    with started(tmp_path, *overrides) as run:
        assert run.wait_for_end(2 * START_DEADLINE_S) == 0, run.output.read_text()
    assert audit(run.run_dir).findings == ()
    evaluations = steps_of(run.run_dir, "eval/accuracy")
    assert [record["step"] for record in evaluations] == [0, 4]
    assert all(f"val/{source}/avg@1" in evaluations[0] for source in SOURCES)
    steps = steps_of(run.run_dir, "critic/rewards/mean")
    for number, record in enumerate(steps, 1):
        due = number * sum(record[f"sources/{source}/groups"] for source in SOURCES) / len(SOURCES)
        for source in SOURCES:
            assert abs(record[f"sources/{source}/trained_groups"] - due) < 1
            assert record[f"sources/{source}/staleness_max"] <= 2
    assert steps[-1]["agent/searches"] > 0 and steps[-1]["agent/turns"] > 1
    assert "sources/arithmetic/curriculum/pass_rate" in steps[-1]
    outcome, told = replay(run.run_dir)
    assert (outcome["steps"], outcome["equal"], outcome["equality_expected"]) == (4, 4, True), told


def check_other_values(run_dir: Path) -> None:
    """Two replays with other values, one after another, which Compare lists beside the run."""
    outcomes, told = replay(run_dir, f"steps={STEPS - 3}:{STEPS}", "algorithm.loss=gspo,cispo", "evaluate=true")
    assert [outcome["changes"] for outcome in outcomes] == [["algorithm.loss=gspo"], ["algorithm.loss=cispo"]]
    assert "not what another run would have sampled" in told and "gradient cosine" in told
    for outcome in outcomes:
        rows = read_metrics(Path(outcome["folder"]) / "metrics.jsonl")
        assert [row["step"] for row in rows] == [*range(STEPS - 3, STEPS + 1), STEPS]
        assert rows[-1]["eval/accuracy"] == outcome["accuracy_after"] and 0 <= outcome["accuracy_after"] <= 1
        assert Run.open(Path(outcome["folder"])).has_ended
    names = set(named_runs([run_dir]))
    assert {"run", "run/exact", "run/algorithm.loss-gspo", "run/algorithm.loss-cispo"} <= names
