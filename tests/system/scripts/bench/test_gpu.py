"""The check for one GPU as a dry run: the code of every part runs on a CPU, with real engines, trainers and runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.nightly
PARTS = ("tests_updates", "updates_small", "shared_gpu", "trainer_0.5b", "trainer_7b", "attention", "logprobs")
PARTS += ("loading_7b", "adapter_1.5b", "speculation", "asynchrony", "recipe")
"""The other sizes are the same on a CPU."""


@pytest.mark.timeout(1600)
def test_every_part_runs_and_leaves_its_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.gpu", "--dry-run", "--folder", str(tmp_path / "check")]
    command += ["--budget-s", "2000", "--only", *PARTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1580, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["outcomes"] == dict.fromkeys(PARTS, "done") and found["errors"] == {}
    assert found["tests_updates.skipped"] >= 2
    for staging in ("host", "device"):
        assert found[f"updates_small.{staging}_shared_memory_pause_ms"] > 0
    assert found["trainer_7b.tokens_per_s"] > 0 and found["recipe.steps"] == found["shared_gpu.steps"] == 2
    assert found["asynchrony.async_over_sync"] > 0
    assert found["attention.packed_varlen_logprob_gap"] < 1e-5 and found["logprobs.gradient_gap"] < 1e-5
    assert 0 < found["adapter_1.5b.host_adapter_sent_mb"] < found["adapter_1.5b.host_shared_memory_sent_mb"]
    assert found["loading_7b.gb_per_s"] > 0 and 0 < found["speculation.ngram_acceptance"] <= 1
    assert done.stdout.count("| done |") == len(PARTS)
