"""Sinks show of single trajectories what was trained, cut small, and can write it whatever a policy says."""

import math

import numpy as np
import pytest

from rollout.types import VersionSpan
from tests.support.recordings import example_advantages, example_groups
from tests.support.reference import make_group, make_trajectory
from trainer.tracking.samples import (
    CUT,
    MAX_BINS,
    MAX_CHARACTERS,
    RESPONSE_LENGTH,
    REWARDS,
    STALENESS,
    Sampler,
    histogram,
)
from trainer.tracking.step_metrics import group_metrics


def test_histograms_are_of_the_same_values_as_the_metrics_of_the_step() -> None:
    groups, advantages = example_groups(), example_advantages()
    for interval in (1, 2):
        shown = Sampler(interval=interval, num_rows=0).take(7, groups, advantages).histograms
        metrics = group_metrics(groups, advantages, 6, interval)
        for name, metric in (
            (STALENESS, "staleness"),
            (RESPONSE_LENGTH, "response_length"),
            (REWARDS, "critic/rewards"),
        ):
            assert shown[name].total / sum(shown[name].counts) == pytest.approx(metrics[f"{metric}/mean"])
    one = Sampler(interval=1, num_rows=0).take(7, groups, advantages).histograms[STALENESS]
    assert (one.counts, one.edges) == ((4, 4, 1), (-0.5, 0.5, 1.5, 2.5)), "a bin for each number of versions"


def test_rows_go_from_the_least_to_the_most_rewarded_and_say_which_version_sampled_which_tokens() -> None:
    rows = Sampler(interval=1, num_rows=2).take(7, example_groups(), example_advantages()).rows
    assert [(row.ordinal, row.index, row.reward) for row in rows] == [(30, 1, 0.0), (31, 1, 1.0)]
    every = Sampler(interval=1, num_rows=99).take(7, example_groups(), example_advantages()).rows
    (crossing,) = [row for row in every if (row.ordinal, row.index) == (30, 0)]
    assert crossing.versions == "2: 0-1, 4: 1-2, 5: 2-4"
    assert (crossing.staleness_max, crossing.advantage, crossing.response_tokens) == (2, 0.7, 4)
    assert len(every) == 4 and not Sampler(interval=1, num_rows=0).take(7, example_groups(), example_advantages()).rows


def test_a_text_is_cut_in_its_middle_and_half_of_a_surrogate_pair_can_be_written() -> None:
    long = make_trajectory([1], [7] * MAX_CHARACTERS, reward=1.0, error="\ud83d is half")
    (row,) = Sampler(interval=1, num_rows=1).take(1, [make_group(3, [long])], [np.zeros(1, np.float32)]).rows
    assert (
        MAX_CHARACTERS - 2 < len(row.response) <= MAX_CHARACTERS
        and CUT in row.response
        and row.response.endswith(" 7 7")
    )
    assert row.error.encode() == b"? is half"


def test_what_has_no_reward_no_tokens_or_no_number_is_in_no_histogram_and_breaks_none() -> None:
    failed = make_trajectory([1], [], spans=(), reward=0.0, error="no reward")
    nan = make_trajectory([1], [5], spans=(VersionSpan(0, 1, 0),), reward=math.nan)
    group, advantages = make_group(3, [failed, nan]), [np.zeros(2, np.float32)]
    shown = Sampler(interval=1, num_rows=2).take(1, [group], advantages)
    assert REWARDS not in shown.histograms and shown.histograms[STALENESS].counts == (1,)
    assert sorted(row.error for row in shown.rows) == ["", "no reward"]
    assert histogram(np.array([np.inf, 1.0])) == histogram(np.array([1.0]))


def test_a_histogram_has_few_bins_whatever_the_values() -> None:
    wide = histogram(np.arange(100_000))
    assert wide is not None and len(wide.counts) == MAX_BINS and sum(wide.counts) == 100_000
    assert wide.total == sum(range(100_000)) and wide.edges[0] == 0


@pytest.mark.parametrize(
    "values", [[0.3, 0.1 + 0.2], [1.0, 1.0 + 2**-52], [-1.7e308, 1.7e308], [1e17, 1e17], [-1e17], [5e-324, 0.0]]
)
def test_values_that_leave_no_room_for_many_bins_are_in_one(values: list[float]) -> None:
    shown = histogram(np.array(values))
    assert shown is not None and shown.counts == (len(values),)
    assert shown.edges[0] <= min(values) <= max(values) <= shown.edges[1] and shown.edges[0] < shown.edges[1]
