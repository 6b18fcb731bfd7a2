"""A batch that breaks a step is recognized and named."""

import math

from tests.support.reference import make_group, make_trajectory
from trainer.loop import not_finite
from trainer.step import broken_rollouts


def test_broken_rollouts_are_named_by_replica_prompt_and_place() -> None:
    fine = make_trajectory([1], [2, 3], rollout_logprobs=[-1.0, -math.inf], loss_mask=[True, False])
    minus, nan = (make_trajectory([1], [2, 3], rollout_logprobs=[-1.0, value]) for value in (-math.inf, math.nan))
    assert broken_rollouts([make_group(7, [fine, fine])]) is None, "what the policy did not sample does not count"
    assert broken_rollouts([make_group(7, [fine, minus]), make_group(8, [nan, fine])]) == (
        "rollout logprobs are not finite: replica-0, prompt 7, trajectory 1; replica-0, prompt 8, trajectory 0"
    )


def test_what_broke_is_named_by_its_metrics() -> None:
    assert not_finite({"a": 1.0, "b": -math.inf, "c": math.nan}) == "not finite: b=-inf, c=nan"
    assert not_finite({"a": 1.0}) == "not finite: logprobs"
