"""The proof of a run that was trained, killed and resumed, and hundreds of changes of its records."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest

from scripts.observe.audit import audit
from tests.support.changed_runs import change_at_random, findings_or_refusal
from tests.support.whole_runs import END_DEADLINE_S, START_DEADLINE_S, small, started

pytestmark = pytest.mark.slow
STEPS = 6


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_changes", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_run_is_proved_and_any_single_change_of_it_is_found(
    num_changes: int, tmp_path: Path, tiny_model: Path
) -> None:
    job = [*small(tiny_model), f"trainer.total_steps={STEPS}", "trainer.eval_every=0", "checkpoint.every=2"]
    with started(tmp_path, *job) as first:
        first.wait_for(" 3/6 ")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    assert audit(first.run_dir).proof.certified is False
    with started(tmp_path, *job, "resume=auto") as second:
        assert second.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, second.output.read_text()
    run_dir = second.run_dir
    report = audit(run_dir)
    assert (report.findings, report.proof.steps, report.proof.certified) == ((), STEPS, True)
    assert report.proof.link[:16] in second.output.read_text(), "a user can keep it"
    lines = [json.loads(line) for line in (run_dir / "proof.jsonl").read_text().splitlines()]
    digests = [line["weights"] for line in lines if line["kind"] == "step"]
    assert len(set(digests)) == STEPS and all(len(digest) == 16 for digest in digests)
    resumed = [line for line in lines if line["kind"] == "beginning"][1]
    assert resumed["origin"]["weights"] == digests[resumed["global_steps"] - 1]
    assert all(line["replicas"]["replica-0"]["checksum"] for line in lines if line["kind"] == "step")
    for name in ("logs", "hydra", "wandb", "untrained_model", "tensorboard"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for seed in range(num_changes):
        changed = tmp_path / f"changed-{seed}"
        shutil.copytree(run_dir, changed)
        what = change_at_random(changed, random.Random(seed))
        assert findings_or_refusal(changed), f"{seed}: {what}"
        shutil.rmtree(changed)
