"""Tools of half an hour beside answers of seconds: nothing is left out, and nothing is lost by it."""

from dataclasses import replace

import pytest

from configs.schema import StalePolicy
from scripts.bench.slow_tail import JOB, run_arm

SMALL = replace(JOB, num_steps=20, prompts_per_step=4, group_size=4)


@pytest.mark.parametrize("max_staleness", [0, 2, 8])
def test_a_trainer_that_waits_leaves_nothing_out_and_is_as_fast_as_may_be(max_staleness: int) -> None:
    figures, covered = run_arm(SMALL, StalePolicy.wait, max_staleness)
    assert covered.num_windows >= 1 and len(covered.trained) == SMALL.num_trajectories
    assert 0 < figures["claimed_with_tool"] < 0.5, "or there is nothing slow"
    assert figures["distance"] == figures["left_out"] == 0
    assert 0.95 <= figures["share_of_limit"] <= 1 + 1e-9


def test_a_trainer_that_drops_learns_without_tools() -> None:
    figures, covered = run_arm(SMALL, StalePolicy.drop, 2)
    assert figures["distance"] > 0.05
    assert figures["with_tool"] < figures["claimed_with_tool"] / 2
    assert figures["distance"] <= covered.largest["coverage/left_out"] + 1e-9
