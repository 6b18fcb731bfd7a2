"""The flat tokens of a step, and the weights that make a sum over them the mean that a user asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.algorithm import LossAggregation
from rollout.types import VersionSpan
from tests.support.reference import make_group, make_trajectory
from trainer.tokens import aggregation_weights, sampled_tokens


def test_sampled_tokens_by_hand() -> None:
    crossing = make_trajectory(
        [1],
        [7, 8, 9],
        loss_mask=[True, False, True],
        rollout_logprobs=[-0.5, 0, -0.25],
        spans=(VersionSpan(0, 2, 3), VersionSpan(2, 3, 5)),
    )
    masked = make_trajectory([1], [4], loss_mask=[False])
    other = make_trajectory([2], [6], rollout_logprobs=[-1], spans=(VersionSpan(0, 1, 6),))
    tokens = sampled_tokens([make_group(0, [crossing, masked]), make_group(1, [other])], global_steps=6)
    assert tokens.targets.tolist() == [7, 9, 6]
    assert tokens.trajectories.tolist() == tokens.sequences.tolist() == [0, 0, 2]
    assert tokens.staleness.tolist() == tokens.steps_behind.tolist() == [3, 1, 0]
    assert tokens.rollout_logprobs.tolist() == [-0.5, -0.25, -1]
    assert tokens.advantages.tolist() == tokens.loss_weights.tolist() == [0, 0, 0]
    part = tokens.take(np.array([2, 0]))
    assert (part.targets.tolist(), part.staleness.tolist(), part.reference_logprobs) == ([6, 7], [0, 3], None)


def test_staleness_is_in_versions_and_steps_behind_in_optimizer_steps() -> None:
    """An update every third step makes versions 0, 3 and 6 live; the batch is trained at step 8."""
    spans = (VersionSpan(0, 1, 0), VersionSpan(1, 2, 3), VersionSpan(2, 3, 6))
    group = make_group(0, [make_trajectory([1], [7, 8, 9], spans=spans)])
    tokens = sampled_tokens([group], global_steps=8, interval=3)
    assert tokens.staleness.tolist() == [2, 1, 0]
    assert tokens.steps_behind.tolist() == [8, 5, 2]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-4, 4), max_size=5), min_size=1, max_size=6), st.sampled_from(LossAggregation))
def test_the_weighted_sum_is_the_mean_that_the_name_says(losses: list[list[float]], how: LossAggregation) -> None:
    trajectories = np.repeat(np.arange(len(losses)), [len(one) for one in losses]).astype(np.int32)
    flat = [loss for one in losses for loss in one]
    kept = [one for one in losses if one]
    if not kept:
        assert aggregation_weights(trajectories, how, 7).tolist() == []
        return
    mean = {
        LossAggregation.token_mean: np.mean(flat),
        LossAggregation.token_sum: np.sum(flat),
        LossAggregation.seq_mean_token_sum: np.mean([np.sum(one) for one in kept]),
        LossAggregation.seq_mean_token_mean: np.mean([np.mean(one) for one in kept]),
        LossAggregation.seq_mean_token_sum_norm: np.mean([np.sum(one) / 7 for one in kept]),
    }[how]
    weights = aggregation_weights(trajectories, how, 7)
    assert weights.dtype == np.float32
    assert np.dot(weights, flat) == pytest.approx(mean, rel=1e-5, abs=1e-5)
