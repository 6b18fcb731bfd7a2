"""The benchmark of agents, whose figures of the scheduling are exact: it runs on a virtual clock."""

import pytest

from scripts.bench.agents import Job, run_simulated


@pytest.mark.slow
def test_episodes_by_themselves_are_twice_as_fast_as_in_lockstep_and_the_figures_repeat() -> None:
    job = Job(num_groups=40, seats=16)
    by_themselves = run_simulated(job, "independent")
    assert by_themselves["samples_per_s"] > 2 * run_simulated(job, "lockstep")["samples_per_s"]
    assert run_simulated(job, "independent") == by_themselves


@pytest.mark.slow
def test_with_slow_tools_an_engine_has_work_all_the_time_and_its_seats_with_more_episodes_than_two_each() -> None:
    two, five = (
        run_simulated(Job(num_groups=48, seats=28, episodes_per_seat=count), "independent") for count in (2, 5)
    )
    with_work = max(two["idle_with_work"], five["idle_with_work"])
    assert with_work < 0.01 < two["engine_idle"], "which counts the stragglers"
    assert five["empty_seats"] < 0.15 and two["empty_seats"] > 0.4
    assert five["samples_per_s"] > 1.5 * two["samples_per_s"]
