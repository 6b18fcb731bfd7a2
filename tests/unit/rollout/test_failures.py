"""The budget of rewards that may fail in a run."""

import pytest

from rollout.failures import FailureBudget, RewardFailuresError


def test_the_budget_is_a_share_of_the_runs_trajectories() -> None:
    budget = FailureBudget(num_trajectories=25, max_failed_rewards=0.1)
    budget.count_rewards([None, "ValueError: the first", None])
    budget.count_rewards(["ValueError: the second"])
    assert budget.gauges()["rollout/failed_rewards"] == 2
    with pytest.raises(RewardFailuresError) as caught:
        budget.count_rewards(["ValueError: the third"])
    assert str(caught.value) == (
        "3 rewards failed, more than rollout.max_failed_rewards=0.1 of the run's 25 trajectories; "
        "the first: ValueError: the first"
    )
    with pytest.raises(RewardFailuresError, match="1 rewards failed, .* the first: no"):
        FailureBudget().count_rewards([None, "no"])
