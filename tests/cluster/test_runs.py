"""A run over three hosts, named as Debian names them and without a way out, through what happens to networks."""

import itertools
import statistics
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollout.events.kinds import FleetEvent
from scripts.observe.events import EventReader
from tests.support.bed import SHARED, Bed, Host, bed, name_of
from tests.support.ray_hosts import START_DEADLINE_S, hosts_of_agent_workers, left_behind, places, start_ray, training
from tests.support.whole_runs import (
    Run,
    check_tokens,
    check_training,
    command_of,
    save_chat_model,
    steps_of,
    trained,
)
from trainer.tracking.events.kinds import StepPart, StepPartEnded

TOTAL_STEPS = 150
FAULT_DEADLINE_S = 300
LONG_PROMPTS = ("data.max_prompt_tokens=512", "rollout.max_response_tokens=64", "rollout.max_failed_rewards=0")
"""Of agents, whose prompts are conversations."""
CLOCKS_AHEAD_S = {2: 86400, 3: -86400}


def more_steps(run: Run, count: int) -> None:
    """Wait until the run has taken so many more steps."""
    run.wait_for_count("step  ", run.output.read_text().count("step  ") + count, FAULT_DEADLINE_S)


def tell(what: str, run: Run, since: float) -> None:
    """Print the longest time without a step, and when the fleet changed, in seconds since the fault."""
    stamped = list(EventReader(run.run_dir))
    steps = [s.time - since for s in stamped if isinstance(s.event, StepPartEnded) and s.event.part is StepPart.train]
    gaps = [after - before for before, after in itertools.pairwise(steps) if after > 0]
    changes = [f"{s.time - since:.1f} s {s.event.text}" for s in stamped if isinstance(s.event, FleetEvent)]
    later = [text for text in changes if not text.startswith("-")]
    sys.stdout.write(f"\n{what}: no step for {max(gaps):.1f} s (median {statistics.median(gaps):.1f} s); {later}\n")


def check_times(run: Run, started: float) -> None:
    """All times in the records are the driver's, whatever the clocks of the hosts show."""
    times = [stamped.time for stamped in EventReader(run.run_dir)]
    times += [record["began"] for step in trained(run) for record in step]
    assert started < min(times) and max(times) < time.time() + 60


def disturb(made: Bed, *, round_trip_ms: float = 0, loss_percent: float = 0, mbit: float = 0) -> None:
    """Disturb the way between any two hosts so much: half of it at either end."""
    for host in made.hosts:
        made.disturb(host, round_trip_ms=round_trip_ms / 2, loss_percent=loss_percent / 2, mbit=mbit)


def has_ray(host: Host) -> bool:
    """Whether Ray's daemon is there. What it has started may outlive it for a moment."""
    return any("/raylet/raylet " in command_of(process) for process in host.processes())


def host_of_a_replica_alone(made: Bed, run: Run) -> tuple[Host, str]:
    """Return a host, without driver, head and trainer, that has a replica, and its name."""
    where = places(run.run_dir)
    taken = {name_of(1), where["trainer-0"]}
    name = next(name for name, host in where.items() if name.startswith("replica-") and host not in taken)
    return next(host for host in made.hosts if host.name == where[name]), name


@pytest.mark.timeout(2400)
def test_a_run_over_three_hosts_goes_on_through_delay_loss_partitions_and_a_host_that_dies(tmp_path: Path) -> None:
    slow = {"SLOW_REWARDS": str(SHARED / "slow")}
    started = time.time()
    with bed(tmp_path / "bed", is_debian=True, has_route=False, clocks_ahead_s=CLOCKS_AHEAD_S) as made:
        head = made.hosts[0]
        (made.shared / "slow").touch()
        for host in made.hosts:
            start_ray(host, head, num_cpus=2, **slow)
        with training(
            made,
            head,
            tmp_path,
            f"trainer.total_steps={TOTAL_STEPS}",
            "weight_sync.transport=collective",
            "rollout.num_replicas=2",
            "rollout.num_agent_workers=3",
            "rollout.reward=tests.support.rewards:slow_while_a_file_exists",
            "rollout.replica_timeout_s=60",
            "rollout.agent_worker_timeout_s=30",
            **slow,
        ) as run:
            run.wait_for("step  ", START_DEADLINE_S)
            disturb(made, round_trip_ms=50, loss_percent=1)
            more_steps(run, 3)
            disturb(made)
            victim, replica = host_of_a_replica_alone(made, run)
            with pytest.raises(AssertionError, match="fleet error: .* it runs on node1"):
                victim.run("python", "-m", "scripts.fleet", "--run", SHARED / "run", "status")

            since = time.time()
            made.partition(victim)
            time.sleep(10)
            made.heal(victim)
            more_steps(run, 3)
            assert " is given up: " not in run.output.read_text()
            tell(f"10 s partition of {replica}", run, since)

            since = time.time()
            made.die(victim)
            run.wait_for(f"{replica} is given up: ", FAULT_DEADLINE_S)
            more_steps(run, 3)
            tell(f"the host of {replica} died", run, since)
            since = time.time()
            start_ray(made.bring_up(victim.number), head, num_cpus=2, **slow)
            run.wait_for("replica-2 is in service", START_DEADLINE_S)
            more_steps(run, 3)
            tell("another host joined", run, since)
            (made.shared / "slow").unlink()
            assert run.wait_for_end(FAULT_DEADLINE_S) == 0, run.output.read_text()
        assert {host.name: left_behind(host) for host in made.hosts} == {host.name: [] for host in made.hosts}
        where = places(run.run_dir)
        assert len({where["trainer-0"], where[replica]}) == 2
        assert hosts_of_agent_workers(run.run_dir) == {host.name for host in made.hosts}
        check_training(run, TOTAL_STEPS)
        check_tokens(run.run_dir)
        check_times(run, started)
        assert "replica-2" in {record["replica"] for step in trained(run) for record in step}
        assert steps_of(run.run_dir, "rollout/replicas_lost")[-1]["rollout/replicas_lost"] == 1


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_replica_and_sessions_that_are_cut_off_for_a_minute_come_back_or_are_replaced(tmp_path: Path) -> None:
    """On the same host are an agent worker and the open sessions of its agents, which ask over HTTP."""
    slow = {"SLOW_REWARDS": str(SHARED / "slow")}
    started = time.time()
    with bed(tmp_path / "bed", is_debian=True, has_route=False, clocks_ahead_s=CLOCKS_AHEAD_S) as made:
        head = made.hosts[0]
        (made.shared / "slow").touch()
        for host in made.hosts:
            start_ray(host, head, num_cpus=2, **slow)
        save_chat_model(made.shared / "model")
        keys = ("trainer.total_steps=100000", "weight_sync.transport=collective", "rollout.num_replicas=2")
        agent = ("rollout.agent=tests.support.session_agents:asks_twice", "rollout.num_agent_workers=3")
        with training(made, head, tmp_path, *keys, *agent, *LONG_PROMPTS, **slow) as run:
            run.wait_for("step  ", START_DEADLINE_S)
            more_steps(run, 5)
            victim, replica = host_of_a_replica_alone(made, run)
            assert victim.name in {
                host for name, host in places(run.run_dir).items() if name.startswith("agent-worker")
            }
            since = time.time()
            made.partition(victim)
            time.sleep(60)
            made.heal(victim)
            more_steps(run, 10)
            if f"{replica} is given up: " in run.output.read_text():
                is_back = "replica-2 is in service"
                while has_ray(victim) and is_back not in run.output.read_text():
                    assert time.time() < since + START_DEADLINE_S, f"Ray does not end on {victim.name}"
                    time.sleep(1)
                if not has_ray(victim):  # Ray had given up the host, and its daemon has heard so
                    start_ray(victim, head, num_cpus=2, **slow)
                run.wait_for(is_back, START_DEADLINE_S)
            tell(f"60 s partition of {replica} and sessions", run, since)
            for process in psutil.Process(run.process.pid).children():
                process.terminate()
            assert run.wait_for_end(FAULT_DEADLINE_S) == 130, run.output.read_text()
        check_tokens(run.run_dir)
        check_times(run, started)
        assert {host.name: left_behind(host) for host in made.hosts} == {host.name: [] for host in made.hosts}


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_ranks_whose_host_is_slow_cut_off_and_lost_train_the_same_steps(tmp_path: Path) -> None:
    with bed(tmp_path / "bed", has_route=True, num_networks=2) as made:
        head = made.hosts[0]
        start_ray(head, head, num_cpus=2)
        for host in made.hosts[1:]:
            start_ray(host, head, num_cpus=4)
        reward = "rollout.reward=tests.support.rewards:length_parity"
        keys = ("trainer.total_steps=100000", "trainer.num_ranks=2", "checkpoint.every=5", reward)
        weights = (
            "weight_sync.transport=filesystem",
            f"weight_sync.directory={SHARED}/weights",
            "weight_sync.delta=true",
        )
        with training(made, head, tmp_path, *keys, *weights) as run:
            run.wait_for("step  ", START_DEADLINE_S)
            since = time.time()
            disturb(made, round_trip_ms=200, mbit=20)
            more_steps(run, 3)
            tell("200 ms and 20 Mbit/s between all", run, since)
            disturb(made)
            where = places(run.run_dir)
            victim = next(host for host in made.hosts if host.name == where["trainer-1"])
            assert victim is not head

            since = time.time()
            made.partition(victim)
            time.sleep(20)
            made.heal(victim)
            more_steps(run, 3)
            tell("20 s partition of a rank", run, since)
            num_restarts = run.output.read_text().count("the train workers are back at step")

            since = time.time()
            made.die(victim)
            run.wait_for_count("the train workers are back at step", num_restarts + 1, FAULT_DEADLINE_S)
            more_steps(run, 3)
            tell("the host of a rank died", run, since)
            for process in psutil.Process(run.process.pid).children():
                process.terminate()
            assert run.wait_for_end(FAULT_DEADLINE_S) == 130, run.output.read_text()
        check_tokens(run.run_dir)
        assert {host.name: left_behind(host) for host in made.hosts} == {host.name: [] for host in made.hosts}
