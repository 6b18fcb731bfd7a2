"""The distance between what is trained and what was claimed, and the windows that it is taken over."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.types import DiscardedGroup, DiscardReason, Trajectory, TrajectoryGroup, VersionSpan
from tests.support.reference import make_group, make_trajectory
from trainer.tracking.coverage import Coverage, Fate, distance, distances, measures

WINDOW, GROUP_SIZE = 4, 2
NOTHING_LEFT_OUT = {
    "coverage/length_distance": 0.0,
    "coverage/turns_distance": 0.0,
    "coverage/tool_s_distance": 0.0,
    "coverage/late_distance": 0.0,
    "coverage/left_out": 0.0,
}
samples = st.lists(st.integers(0, 6), max_size=12)
"""Few different values, so that many are equal."""


@given(samples, samples)
def test_the_distance_is_that_between_the_cumulative_distributions(some: list[int], others: list[int]) -> None:
    found = distance(np.array(some, float), np.array(others, float))
    if not some or not others:
        assert found == (some != others)
        return
    every = [
        abs(sum(x <= at for x in some) / len(some) - sum(x <= at for x in others) / len(others)) for at in range(7)
    ]
    assert found == pytest.approx(max(every))


@given(samples.filter(bool), samples)
def test_what_is_left_out_moves_the_distance_by_its_share_at_most(trained: list[int], left_out: list[int]) -> None:
    values = np.array([[value] * 3 for value in [*trained, *left_out]], float)
    fates = np.array([Fate.TRAINED] * len(trained) + [Fate.LATE] * len(left_out))
    found, share = distances(values, fates), len(left_out) / len(values)
    assert found["coverage/left_out"] == pytest.approx(share)
    apart = distance(np.array(trained, float), np.array(left_out, float)) if left_out else 0.0
    for name in ("length", "turns", "tool_s", "late"):
        assert found[f"coverage/{name}_distance"] == pytest.approx(share * apart)


def test_the_measures_are_sampled_tokens_turns_and_tool_seconds() -> None:
    spans = VersionSpan(0, 2, 3), VersionSpan(2, 3, 4), VersionSpan(5, 6, 4)
    trajectory = replace(make_trajectory([1], [2] * 6, spans=spans), tool_s=1800.0004)
    assert measures(trajectory) == (4, 2, 1800.0)


def group(ordinal: int, *lengths: int, **fields: object) -> TrajectoryGroup:
    return make_group(ordinal, [replace(make_trajectory([1], [2] * length), **fields) for length in lengths])


def discarded(ordinal: int, reason: DiscardReason, *lengths: int) -> DiscardedGroup:
    trajectories = group(ordinal, *lengths).trajectories if lengths else ()
    return DiscardedGroup(prompt=group(ordinal, 1).prompt, reason=reason, trajectories=trajectories)


def masked(trajectory: Trajectory) -> Trajectory:
    (sequence,) = trajectory.sequences
    return replace(trajectory, sequences=(replace(sequence, loss_mask=np.zeros_like(sequence.loss_mask)),))


def coverage(*, mask_truncated: bool = False) -> Coverage:
    return Coverage(window=WINDOW, group_size=GROUP_SIZE, mask_truncated=mask_truncated)


@given(st.permutations(range(3 * WINDOW)))
def test_in_whatever_order_groups_are_trained_nothing_is_left_out(order: list[int]) -> None:
    """The order is that of max_staleness: short ones first. A window is told of once, with its last group."""
    one, logged = coverage(), []
    for ordinal in order:
        one.take_trained([group(ordinal, 1 + ordinal, 1 + ordinal)])
        logged.append(one.metrics())
    last = {max(order.index(ordinal) for ordinal in range(first, first + WINDOW)) for first in (0, WINDOW, 2 * WINDOW)}
    assert [metrics for at, metrics in enumerate(logged) if at in last] == [NOTHING_LEFT_OUT] * len(last)
    assert all(metrics == {} for at, metrics in enumerate(logged) if at not in last)


def test_a_window_with_a_group_under_way_says_nothing() -> None:
    one = coverage()
    one.take_trained([group(ordinal, 1, 1) for ordinal in (0, 1, 2)])  # 3 takes an hour
    one.take_trained([group(ordinal, 1, 1) for ordinal in range(WINDOW, 2 * WINDOW)])
    assert one.metrics() == NOTHING_LEFT_OUT, "of the second window"
    one.take_discarded(discarded(3, DiscardReason.unneeded))
    assert one.metrics() == {}, "the run has ended without it"
    one.take_trained([group(3, 500, 500)])
    assert one.metrics() == NOTHING_LEFT_OUT


@pytest.mark.parametrize(
    ("reason", "lengths", "late"),
    [
        (DiscardReason.stale, (500, 500), 0.25),
        (DiscardReason.failed, (), 0.25),  # of unknown length, and so the longest
        (DiscardReason.filtered, (500, 500), 0.0),
        (DiscardReason.aborted, (500, 500), 0.0),
    ],
)
def test_a_quarter_that_is_left_out_is_a_quarter_away(
    reason: DiscardReason, lengths: tuple[int, ...], late: float
) -> None:
    one = coverage()
    one.take_discarded(discarded(1, reason, *lengths))
    one.take_trained([group(ordinal, 1, 2) for ordinal in (0, 2, 3)])
    metrics = one.metrics()
    assert metrics["coverage/length_distance"] == pytest.approx(0.25)
    assert metrics["coverage/left_out"] == pytest.approx(0.25)
    assert metrics["coverage/late_distance"] == pytest.approx(late)


def test_a_trajectory_without_a_loss_token_is_left_out() -> None:
    """With stale_policy=mask a group that took too long is trained, but none of its tokens is."""
    one, slow = coverage(), group(3, 500, 500)
    one.take_trained([group(ordinal, 1, 1) for ordinal in (0, 1, 2)])
    one.take_trained([replace(slow, trajectories=tuple(map(masked, slow.trajectories)))])
    assert one.metrics()["coverage/late_distance"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("fields", "mask_truncated", "left_out", "late"),
    [
        ({"finish_reason": "length"}, False, 0.0, 0.0),
        ({"finish_reason": "length"}, True, 0.25, 0.0),
        ({"finish_reason": "abort"}, False, 0.25, 0.0),
        ({"finish_reason": "abort", "error": "the session has ended"}, False, 0.25, 0.0),
        ({"error": "the environment took too long"}, False, 0.25, 0.25),
    ],
)
def test_trajectories_of_trained_groups_may_be_left_out(
    fields: dict[str, str], mask_truncated: bool, left_out: float, late: float
) -> None:
    one = coverage(mask_truncated=mask_truncated)
    one.take_trained([group(ordinal, 1, 1) for ordinal in (0, 1, 2)])
    one.take_trained([group(3, 500, 500, **fields)])
    metrics = one.metrics()
    assert metrics["coverage/length_distance"] == pytest.approx(left_out)
    assert metrics["coverage/left_out"] == pytest.approx(left_out)
    assert metrics["coverage/late_distance"] == pytest.approx(late)


def test_where_windows_end_in_one_step_the_largest_distance_counts() -> None:
    one = coverage()
    one.take_trained([group(ordinal, 1, 1) for ordinal in range(2 * WINDOW) if ordinal != 1])
    one.take_discarded(discarded(1, DiscardReason.stale, 9, 9))
    assert one.metrics()["coverage/late_distance"] == pytest.approx(0.25)
