"""A sweep of whole runs, one after another in one process."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.whole_runs import small, started, steps_of


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_sweep_trains_every_job_and_leaves_a_table(tmp_path: Path, tiny_model: Path) -> None:
    """The second starts a Ray and replicas of its own."""
    sweep = tmp_path / "sweep"
    overrides = [*small(tiny_model), "trainer.total_steps=2", "trainer.eval_every=0", "wandb.mode=disabled"]
    overrides += ["-m", f"hydra.sweep.dir={sweep}", "trainer.lr=1e-4,1e-5"]
    with started(tmp_path, *overrides) as run:
        assert run.wait_for_end(500) == 0, run.output.read_text()
        assert run.survivors() == []
    jobs = json.loads((sweep / "sweep.json").read_text())
    assert [(job["status"], job["overrides"][-1]) for job in jobs] == [
        ("finished", "trainer.lr=0.0001"),
        ("finished", "trainer.lr=1e-05"),
    ]
    rates = []
    for number in range(2):
        summary = json.loads((sweep / str(number) / "summary.json").read_text())
        assert summary["accuracy_after"] == jobs[number]["accuracy"]
        steps = steps_of(sweep / str(number), "actor/lr")
        rates.append(steps[-1]["actor/lr"])
    assert rates[0] == pytest.approx(10 * rates[1])
    assert "trainer.lr=1e-05" in run.output.read_text().splitlines()[-2]
    evaluate = (sys.executable, "-m", "scripts.evaluate", str(sweep / "1"))
    with started(tmp_path / "evaluation", "wandb.mode=disabled", command=evaluate) as run:
        assert run.wait_for_end(500) == 0, run.output.read_text()
    report = json.loads((run.run_dir / "evaluation.json").read_text())
    assert report["num_prompts"] == 16 and report["reward"].endswith(":length_parity")
    assert report["scores"][""]["avg@1"] == pytest.approx(jobs[1]["accuracy"], abs=0.07)
    assert (tmp_path / "latest").resolve() == sweep / "1"
