"""The benchmark of agents: what it says of the scheduling is exact, on a virtual clock."""

from scripts.bench.agents.__main__ import bench_simulated
from scripts.bench.agents.episodes import Job


def test_episodes_by_themselves_are_twice_as_fast_as_in_lockstep_and_the_figures_repeat() -> None:
    job = Job(num_groups=40, seats=16)
    figures = bench_simulated(job)
    assert figures["independent_over_lockstep"] > 2
    assert bench_simulated(job) == figures
