"""A run on hosts whose disks become full, one after the other, and have room again."""

from pathlib import Path

import pytest

from tests.support.bed import SHARED, Host, bed
from tests.support.ray_hosts import START_DEADLINE_S, left_behind, start_ray, training
from trainer.checkpoint.store import CheckpointStore
from trainer.tracking.sinks import read_metrics

RUN = "/tmp/run"
"""A folder of each host's own disk, which Ray's own files are on, too."""
DEADLINE_S = 600
TOTAL_STEPS = 150
"""More than there are before the rewards are fast, so that every step is told in the same width."""


def fill(host: Host) -> None:
    host.run("bash", "-c", "! dd if=/dev/zero of=/tmp/full bs=4096 2>&1")


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_full_disk_costs_records_and_no_training(tmp_path: Path) -> None:
    slow = {"SLOW_REWARDS": str(SHARED / "slow")}
    with bed(tmp_path / "bed", num_hosts=2) as made:
        head, other = made.hosts
        (made.shared / "slow").touch()
        start_ray(head, head, num_cpus=1, **slow)
        start_ray(other, head, num_cpus=2, **slow)
        with training(
            made,
            head,
            tmp_path,
            f"hydra.run.dir={RUN}",
            "checkpoint.every=2",
            f"trainer.total_steps={TOTAL_STEPS}",
            "rollout.reward=tests.support.rewards:slow_while_a_file_exists",
            **slow,
        ) as run:
            run.wait_for("step  ", START_DEADLINE_S)
            for host in (other, head):
                fill(host)
                count = run.output.read_text().count("step  ")
                run.wait_for_count("step  ", count + 4, DEADLINE_S)
                host.run("rm", "/tmp/full")
            count = run.output.read_text().count("step  ")
            run.wait_for_count("step  ", count + 4, DEADLINE_S)
            (made.shared / "slow").unlink()
            assert run.wait_for_end(DEADLINE_S) == 3, run.output.read_text()  # records are missing
            output = run.output.read_text()
            checkpoint = CheckpointStore(head.path(RUN) / "checkpoints").newest_good(pytest.fail)
            assert checkpoint is not None and checkpoint.global_steps == TOTAL_STEPS
        assert " failed: the train workers could not write: " in output and "training goes on" in output
        recorded = {line["step"] for line in read_metrics(head.path(RUN) / "metrics.jsonl") if "actor/pg_loss" in line}
        lost = {*range(1, TOTAL_STEPS + 1)} - recorded
        assert 0 < len(lost) <= 8 and lost == {*range(min(lost), max(lost) + 1)}
        assert {host.name: left_behind(host) for host in made.hosts} == {host.name: [] for host in made.hosts}
