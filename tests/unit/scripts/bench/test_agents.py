"""The benchmark of agents: what it says of the scheduling is exact, on a virtual clock."""

from scripts.bench.agents.engines import run_simulated
from scripts.bench.agents.episodes import Job


def test_episodes_by_themselves_are_twice_as_fast_as_in_lockstep_and_the_figures_repeat() -> None:
    job = Job(num_groups=40, seats=16)
    by_themselves = run_simulated(job, "independent")
    assert by_themselves.samples_per_s > 2 * run_simulated(job, "lockstep").samples_per_s
    assert run_simulated(job, "independent") == by_themselves
