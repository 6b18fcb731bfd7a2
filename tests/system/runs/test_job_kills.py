"""A whole job, on simulated engines, killed by SIGKILL at twenty seeded moments, some of them inside a save."""

from pathlib import Path

import pytest

from scripts.bench.faults import job_kills
from tests.support.whole_runs import check_tokens


@pytest.mark.slow
def test_twenty_kills_cost_no_prompt_and_train_none_twice(tmp_path: Path) -> None:
    row = job_kills(num_kills=20, seed=0, folder=tmp_path)
    assert (row.injected, row.lost, row.twice) == (20, 0, 0)
    for run_dir in sorted(tmp_path.iterdir()):
        found = check_tokens(run_dir)
        assert (found.steps, found.prompts, found.descending_versions) == (60, 60 * 8, 0)
        assert found.newer_versions == 0 and found.max_staleness <= 2
