"""Replicas that die, hang, come and go in a whole run, and a driver that is killed: nothing is lost or left behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.whole_runs import (
    Run,
    check_tokens,
    check_training,
    command_of,
    find,
    small,
    started,
    steps_of,
    survivors,
    trained,
)

pytestmark = pytest.mark.slow

RECOVERY_DEADLINE_S = 300
TOTAL_STEPS = 80
"""About 4 s each while the rewards are slow: for as long as two engines need to start, at least."""


def fleet(run: Run, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m scripts.fleet` on the run."""
    command = [sys.executable, "-m", "scripts.fleet", "--run", str(run.run_dir), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def num_steps(run: Run) -> int:
    return sum(line.startswith("step ") for line in run.output.read_text().splitlines())


def given_up(run: Run, count: int) -> str:
    """Name of the replica of the `count`-th loss."""
    run.wait_for_count(" is given up: ", count, RECOVERY_DEADLINE_S)
    lines = [line for line in run.output.read_text().splitlines() if " is given up: " in line]
    return lines[count - 1].split(" is given up")[0]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_replicas_that_die_hang_come_and_go(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL of an engine, which is replaced, SIGSTOP of an actor, which is not, add and drain, in one run that trains
    all the while. Requests that move between replicas go on with what sampling had left them."""
    slow = tmp_path / "slow"
    slow.touch()
    monkeypatch.setenv("SLOW_REWARDS", str(slow))
    long_path = tmp_path / ("long" * 30)  # longer than the path of a socket may be
    long_path.mkdir()
    with started(
        long_path,
        *small(tiny_model, "slow_while_a_file_exists"),
        f"trainer.total_steps={TOTAL_STEPS}",
        "trainer.eval_every=0",
        "rollout.num_replicas=2",
        "rollout.max_response_tokens=64",
        "rollout.top_p=0.9",
        "rollout.top_k=20",
        "rollout.replica_timeout_s=90",  # two engines start beside it on two cores, and maybe other tests
        "rollout.max_replacements=1",
    ) as run:
        run.wait_for("step  ")
        find(run, "VLLM::EngineCore").send_signal(signal.SIGKILL)
        dead = given_up(run, 1)
        (other,) = {"replica-0", "replica-1"} - {dead}
        assert fleet(run, "add").stdout == "starting replica-3; status tells when they serve\n"
        assert fleet(run, "remove", dead).stderr == f"fleet error: {dead} cannot be removed: it has ended already\n"
        assert fleet(run, "drain", other).stderr == (
            f"fleet error: {other} cannot go: 0 replicas would be left, rollout.min_replicas=1\n"
        )
        steps = num_steps(run)
        for name in ("replica-2", "replica-3"):
            run.wait_for(f"{name} is in service", RECOVERY_DEADLINE_S)
        assert num_steps(run) > steps + 2, "the trainer did not stop"
        states = dict(line.split()[:2] for line in fleet(run, "status").stdout.splitlines()[1:])
        assert states == {dead: "DEAD", other: "READY", "replica-2": "READY", "replica-3": "READY"}
        find(run, "ray::Replica").send_signal(signal.SIGSTOP)
        stopped = given_up(run, 2)
        leaving = min({"replica-2", "replica-3"} - {stopped})
        assert fleet(run, "drain", leaving).stdout == f"{leaving} drains\n"
        run.wait_for(f"{leaving} leaves: drained", RECOVERY_DEADLINE_S)
        slow.unlink()
        assert run.wait_for_end(RECOVERY_DEADLINE_S) == 0, run.output.read_text()
        assert run.survivors() == []
        assert not (run.run_dir / "fleet.sock").is_symlink()
        check_training(run, TOTAL_STEPS)
        check_tokens(run.run_dir)
        assert not any(step["rollout/unknown_kept"] for step in steps_of(run.run_dir))
        assert {record["replica"] for step in trained(run) for record in step} & {"replica-2", "replica-3"}
        last = steps_of(run.run_dir, "rollout/replicas_lost")[-1]
        assert last["rollout/replicas_lost"] == 2 and last["rollout/replicas_replaced"] == 1
        assert last["rollout/replicas_ready"] >= 1 and last["rollout/recovery_s"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_only_replica_may_die_under_an_evaluation(tmp_path: Path, tiny_model: Path) -> None:
    """No training needs the replica at that moment: before the first step, and after the last."""
    with started(
        tmp_path,
        *small(tiny_model),
        "trainer.total_steps=2",
        "trainer.eval_every=0",
        "rollout.max_response_tokens=64",
        "evaluation.samples=32",
        "evaluation.temperature=1",
    ) as run:
        for count, stage in enumerate(("before the first step", "after the last step"), start=1):
            run.wait_for(f"evaluating {stage}")
            find(run, "VLLM::EngineCore").send_signal(signal.SIGKILL)
            given_up(run, count)
        assert run.wait_for_end(RECOVERY_DEADLINE_S) == 0, run.output.read_text()
        evaluated = steps_of(run.run_dir, "eval/accuracy")
        assert [(m["step"], m["eval/pinned"]) for m in evaluated] == [(0, 1), (2, 1)]
        check_training(run, 2)
        check_tokens(run.run_dir)


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(how, marks=pytest.mark.nightly) for how in ("own cluster", "standing cluster")),
        "own cluster, killed with it",
    ],
)
def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path, tiny_model: Path, how: str) -> None:
    overrides = [*small(tiny_model), "trainer.total_steps=100000", "trainer.eval_every=0"]
    if how != "standing cluster":
        check_the_end_of_a_killed_driver(tmp_path, overrides, "raylet" if how.endswith("it") else None)
        return
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    try:
        check_the_end_of_a_killed_driver(tmp_path, [*overrides, f"ray.address={cluster.address}"])
    finally:
        cluster.shutdown()


OF_A_RUN = ("ray::ReplicaActor", "ray::TrainWorkerActor", "ray::AgentWorkerActor", "VLLM::", "wandb")


def children() -> dict[psutil.Process, str]:
    """Return all that this process has started, with their command lines."""
    return {process: command_of(process) for process in psutil.Process().children(recursive=True)}


def of_runs(lines: Mapping[psutil.Process, str]) -> list[psutil.Process]:
    return [process for process, line in lines.items() if any(title in line for title in OF_A_RUN)]


def check_the_end_of_a_killed_driver(tmp_path: Path, overrides: list[str], raylet: str | None = None) -> None:
    """Kill the driver, and check that nothing of the run is left. On a standing cluster the processes of the run are
    no children of the driver, and Ray's own stay. `raylet`: its name, to kill it and the actors too, so that nobody
    of Ray is left to end what the actors have started."""
    others = of_runs(children())  # engines that tests before this one have left to tests after it
    with started(tmp_path, *overrides) as run:
        run.wait_for("step  ")
        run.watch_children()
        lines = {process: line for process, line in children().items() if process not in others}
        ours = of_runs(lines)
        assert {title for title in OF_A_RUN if any(title in line for line in lines.values())} == set(OF_A_RUN)
        if raylet is not None:
            for process, line in lines.items():
                with contextlib.suppress(psutil.NoSuchProcess):  # they end with one another
                    if process.name() == raylet or "ray::" in line:
                        process.kill()
        os.kill(run.process.pid, signal.SIGKILL)
        assert survivors([*run.children.values(), *ours]) == []
