"""The budget of rewards that may fail in a run."""

import pytest

from rollout.failures import FailureBudget, GroupFailuresError, RewardFailuresError


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


def test_every_source_whose_rewards_or_groups_failed_is_named() -> None:
    budget = FailureBudget(num_trajectories=10, max_failed_rewards=0.2, num_groups=10, max_failed_groups=0.2)
    budget.count_rewards(["OSError: one"], "search")
    with pytest.raises(RewardFailuresError, match=r"10 trajectories \(2 of agent, 1 of search\); the first: search: "):
        budget.count_rewards(["ValueError: two"] * 2, "agent")
    assert budget.gives_up(3, 1, OSError("first"), "search") and budget.gives_up(4, 1, OSError("second"), "agent")
    with pytest.raises(GroupFailuresError, match=r"run's 10 \(2 of agent, 1 of search\); the first: prompt 3 of s"):
        budget.gives_up(5, 1, OSError("third"), "agent")
