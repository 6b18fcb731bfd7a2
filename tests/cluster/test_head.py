"""The host with Ray's head dies under a run whose driver is on another one."""

from pathlib import Path

import pytest

from tests.support.bed import bed
from tests.support.ray_hosts import START_DEADLINE_S, left_behind, start_ray, training
from tests.support.whole_runs import check_tokens
from trainer.checkpoint.store import CheckpointStore


@pytest.mark.timeout(1800)
def test_a_run_that_loses_the_head_saves_a_checkpoint_and_ends_with_an_error(tmp_path: Path) -> None:
    with bed(tmp_path / "bed", num_hosts=2) as made:
        head, driver = made.hosts
        start_ray(head, head, num_cpus=0)
        start_ray(driver, head, num_cpus=5)
        overrides = ["trainer.total_steps=100000", "checkpoint.every=50000"]
        with training(made, driver, tmp_path, *overrides) as run:
            run.wait_for("step  ", START_DEADLINE_S)
            made.die(head)
            num_before = run.output.read_text().count("step  ")
            assert run.wait_for_end(300) == 1, run.output.read_text()
        error = (run.run_dir / "error.txt").read_text()
        assert "HeadLostError: the head of the Ray cluster (10.77.0.1:6379) has not answered for " in error
        assert "a checkpoint was saved meanwhile" in error
        num_steps = run.output.read_text().count("step  ")
        checkpoint = CheckpointStore(run.run_dir / "checkpoints").newest_good(pytest.fail)
        assert checkpoint is not None and num_before <= checkpoint.global_steps <= num_steps
        assert left_behind(driver) == []
        check_tokens(run.run_dir)
