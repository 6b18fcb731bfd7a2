"""The batch script on a real Slurm of two hosts: jobs that end, that are requeued, and that are warned before."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.bed import SHARED, Bed, bed
from tests.support.ray_hosts import left_behind, places
from tests.support.slurm import Slurm
from tests.support.whole_runs import END_DEADLINE_S, START_DEADLINE_S, steps_of

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(slurm.lacks()), reason=slurm.lacks() or "it is here"),
]
SCRIPT = "scripts/deploy/slurm.sh"
ENDED_S = 10.0
"""The time in which a script has ended that Slurm has told to: twice KillWait."""
# Three ranks need more CPUs than one host has.
SFT = [
    *("sft", "device=cpu", "model=tiny", "sizes=tiny", "trainer.num_ranks=3", "trainer.eval_every=0"),
    *("trainer.lr_warmup_steps=0", "data.num_train=200", "data.num_val=16"),
]


@dataclass
class Job:
    """A training that the script runs on both hosts."""

    cluster: Slurm
    number: str
    folder: Path

    @classmethod
    def submitted(cls, made: Bed, cluster: Slurm, name: str, *words: str) -> "Job":
        """Submit it with its output and its run in this folder of those that all hosts see."""
        (made.shared / name).mkdir()
        options = ["--parsable", "--nodes=2", "--time=60", f"--output={SHARED}/{name}/output.txt"]
        words = (*SFT, *words, f"hydra.run.dir={SHARED}/{name}/run")
        return cls(cluster, cluster.call("sbatch", *options, SCRIPT, *words), made.shared / name)

    def output(self) -> str:
        path = self.folder / "output.txt"
        return path.read_text() if path.exists() else ""

    def steps(self) -> list[int]:
        """Return the steps that the records have, after what was set aside."""
        run_dir = self.folder / "run"
        if not (run_dir / "metrics.jsonl").exists():
            return []
        return [record["step"] for record in steps_of(run_dir, "actor/ce_loss")]

    def newest_checkpoint(self) -> int:
        return max(int(path.name.removeprefix("step_")) for path in (self.folder / "run/checkpoints").glob("step_*"))

    def wait(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_DEADLINE_S + END_DEADLINE_S
        state, since = "", 0.0
        while not what():
            if (now := self.cluster.state(self.number)) != state:
                state, since = now, time.monotonic()
            # A job that is about to be queued again may have failed for a moment.
            has_failed = state == "FAILED" and time.monotonic() > since + 30
            told = f"{self.cluster.call('scontrol', 'show', 'job', self.number)}\n{self.output()}"
            assert time.monotonic() < deadline and not has_failed, told
            # Slurm lets a job that was requeued wait for two minutes. What is told meanwhile of the script that ended
            # would end the new one.
            if state == "PENDING" and time.monotonic() > since + ENDED_S:
                with suppress(AssertionError):  # it may have started since
                    self.cluster.call("scontrol", "update", f"jobid={self.number}", "starttime=now")
            time.sleep(0.5)

    def first_steps(self) -> list[int]:
        """Return the first step of each process that has trained."""
        return [int(step) for step in re.findall(r"\] training\n(?:validation.*\n)?step +(\d+)/", self.output())]


def test_a_job_that_is_requeued_goes_on_and_one_that_is_warned_saves_before(tmp_path: Path) -> None:
    with bed(tmp_path / "bed", num_hosts=2) as made, slurm.started(made, cpus=2) as cluster:
        job = Job.submitted(made, cluster, "short", "trainer.total_steps=2")
        job.wait(lambda: cluster.state(job.number) == "COMPLETED")
        assert job.steps() == [1, 2] and not any(host.path(f"/tmp/ray-{job.number}").exists() for host in made.hosts)
        assert set(places(job.folder / "run").values()) == {host.name for host in made.hosts}

        job = Job.submitted(made, cluster, "long", "trainer.total_steps=1000000", "checkpoint.every=5")
        job.wait(lambda: len(job.steps()) > 6)
        cluster.call("scontrol", "requeue", job.number)  # as when a host fails
        saved = job.newest_checkpoint()
        job.wait(lambda: len(job.first_steps()) == 2)
        first, second = job.first_steps()
        # It may have saved again before it was ended.
        assert first == 1 and second > saved and second % 5 == 1

        cluster.call("scancel", "--batch", "--signal=USR1", job.number)  # as Slurm does before the time is over
        job.wait(lambda: "SIGUSR1: saves a checkpoint" in job.output() and "to go on from step" in job.output())
        saved = job.newest_checkpoint()
        assert job.steps()[-1] == saved, "no step is lost"
        job.wait(lambda: len(job.first_steps()) == 3)
        assert job.first_steps()[-1] == saved + 1
        steps = job.steps()
        assert steps == list(range(1, steps[-1] + 1))
        cluster.call("scancel", job.number)
        job.wait(lambda: cluster.state(job.number) == "CANCELLED")
        assert {host.name: left_behind(host) for host in made.hosts} == {host.name: [] for host in made.hosts}
