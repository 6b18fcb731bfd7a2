"""Tools of half an hour beside answers of seconds: nothing is left out, and nothing is lost by it."""

from dataclasses import replace

import pytest

from configs.schema import StalePolicy
from scripts.bench.slow_tail import JOB, Arm, run_arm, with_tool

SMALL = replace(JOB, num_steps=20, prompts_per_step=4, group_size=4)


@pytest.mark.parametrize("max_staleness", [0, 2, 8])
def test_a_trainer_that_waits_leaves_nothing_out_and_is_as_fast_as_may_be(max_staleness: int) -> None:
    arm = run_arm(SMALL, StalePolicy.wait, max_staleness)
    assert arm.covered.num_windows >= 1 and len(arm.covered.trained) == SMALL.num_trajectories
    assert 0 < with_tool(arm.covered.claimed) < 0.5, "or there is nothing slow"
    assert arm.figures["distance"] == arm.figures["left_out"] == 0
    assert 0.95 <= arm.share_of_limit <= 1 + 1e-9


def test_a_trainer_that_drops_learns_without_tools() -> None:
    arm: Arm = run_arm(SMALL, StalePolicy.drop, 2)
    assert arm.figures["distance"] > 0.05
    assert arm.figures["with_tool"] < with_tool(arm.covered.claimed) / 2
    assert arm.figures["distance"] <= arm.covered.largest["coverage/left_out"] + 1e-9
