"""The metrics of a step's groups, by hand."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from rollout.types import TrajectoryGroup, VersionSpan
from tests.support.kept import kept_of
from tests.support.recordings import example_advantages, example_groups
from tests.support.reference import make_group, make_trajectory
from tests.support.routes import routed_group
from tests.support.sequences import with_sequence
from trainer.tracking.step_metrics import group_metrics, is_spanning
from trainer.tracking.trajectories import token_arrays, trajectory_records


def test_an_episode_without_a_sequence_is_recorded_and_counts_in_no_reward() -> None:
    idle = replace(make_trajectory([1], [2], error="asked for nothing"), sequences=())
    group = make_group(0, [make_trajectory([1], [2], reward=1.0), idle])
    advantages = [np.zeros(2, np.float32)]
    metrics = group_metrics([group], advantages, global_steps=0, interval=1)
    assert (metrics["critic/score/mean"], metrics["response_length/mean"]) == (1, 0.5)
    _, record = trajectory_records(group.prompt, group.trajectories, [0.0, None])
    assert (record.sequences, record.error) == ([], "asked for nothing")
    arrays = np.load(BytesIO(token_arrays([group], advantages)))
    assert arrays["num_sequences"].tolist() == [1, 0]


def test_metrics_of_a_step_by_hand() -> None:
    metrics = group_metrics(example_groups(), example_advantages(), global_steps=6, interval=1)
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 3 / 4,
            "critic/rewards/mean": 3 / 4,
            "critic/rewards/max": 1,
            "critic/rewards/min": 0,
            "critic/advantages/mean": 0,
            "critic/advantages/max": 0.7,
            "critic/advantages/min": -0.7,
            "rollout/zero_variance_groups": 1 / 2,
            "rollout/solve_all": 1 / 2,
            "rollout/solve_none": 0,
            "response_length/mean": (4 + 2 + 2 + 2) / 4,
            "response_length/max": 4,
            "response_length/clip_ratio": 1 / 4,
            "prompt_length/mean": (3 + 3 + 1 + 1) / 4,
            "rollout/prefix_cached_tokens": 2 / 4,
            "perf/tokens": 10 + 8,
            # Trained tokens are of versions 4, 5, 5 / 5, 5 / 6, 6 / 6, 6, at step 6.
            "staleness/mean": (2 + 1 + 1 + 1 + 1) / 9,
            "staleness/max": 2,
            "staleness/min": 0,
            "staleness/spanning_trajectories": 1 / 4,
            "staleness/versions_per_trajectory_max": 3,
        }
    )


def test_what_masks_and_routes_are_of_the_traffic() -> None:
    """Two sequences of a prompt of 100 tokens and two sampled ones, a model of 2 layers with 3 experts a token."""
    group = routed_group(100, [[4] * 101, [4] * 101])
    masked = [with_sequence(trajectory, kept=kept_of([[1, 2, 3], [4]])) for trajectory in group.trajectories]
    group, plain, kept, row = replace(group, trajectories=tuple(masked)), 2 * (100 * 4 + 2 * 9), 2 * 4 * (2 + 4), 6

    def traffic(some: TrajectoryGroup) -> dict[str, float]:
        metrics = group_metrics([some], [np.zeros(2, np.float32)], global_steps=0, interval=1)
        return {name: value for name, value in metrics.items() if name.startswith("traffic/") or "route" in name}

    twice, once = 2 * 101 * row, (100 + 2) * row
    for some, routes in ((group, twice), (group.with_shared_routes(), once)):
        total = plain + kept + routes
        assert traffic(some) == pytest.approx(
            {
                "rollout/routed_fraction": 1,
                "rollout/route_megabytes": routes / 1e6,
                "traffic/bytes_per_token": total / 4,
                "traffic/kept_bytes_per_token": kept / 4,
                "traffic/kept_share": kept / total,
                "traffic/route_bytes_per_token": routes / 4,
                "traffic/route_share": routes / total,
            }
        )
    assert traffic(make_group(0, [make_trajectory([1], [2])])) == {}


def test_tokens_of_which_nobody_knows_what_they_were_drawn_from_are_counted() -> None:
    trajectory = with_sequence(make_trajectory([1], [2, 3, 4]), kept=kept_of([[2, 5, 6], None, None]))
    metrics = group_metrics([make_group(0, [trajectory])], [np.zeros(1, np.float32)], global_steps=0, interval=1)
    names = ("rollout/unknown_kept", "rollout/kept_tokens", "rollout/kept_tokens_max")
    assert [metrics[name] for name in names] == [2, 3, 3]


@pytest.mark.parametrize(("reward", "all_right", "none_right"), [(1.0, 1, 0), (0.0, 0, 1), (0.5, 0, 0)])
def test_groups_that_teach_nothing(reward: float, all_right: float, none_right: float) -> None:
    trajectories = [make_trajectory([1], [2], reward=reward)] * 2
    learning = [make_trajectory([1], [2], reward=float(index)) for index in range(2)]
    groups = [make_group(0, trajectories), make_group(1, trajectories), make_group(2, learning)]
    advantages = [np.zeros(2, np.float32)] * 2 + [np.array([-0.7, 0.7], np.float32)]
    metrics = group_metrics(groups, advantages, global_steps=0, interval=1)
    assert metrics["rollout/zero_variance_groups"] == pytest.approx(2 / 3)
    assert metrics["rollout/solve_all"] == pytest.approx(2 / 3 * all_right)
    assert metrics["rollout/solve_none"] == pytest.approx(2 / 3 * none_right)


def test_what_is_learned_and_what_the_reward_said_are_two_metrics() -> None:
    """A solved group stays solved whatever the lengths, and trajectories without a reward count nowhere."""
    late = [make_trajectory([1], [2], reward=1.0, overlong_penalty=penalty) for penalty in (0.0, -0.5)]
    failed = make_trajectory([1], [2], error="ValueError: no number")
    groups = [make_group(0, [*late, failed]), make_group(1, [failed] * 3)]
    metrics = group_metrics(groups, [np.zeros(3, np.float32)] * 2, global_steps=0, interval=1)
    assert metrics["critic/score/mean"] == 1
    assert (metrics["critic/rewards/mean"], metrics["critic/rewards/min"]) == (0.75, 0.5)
    assert (metrics["rollout/solve_all"], metrics["rollout/solve_none"]) == (0.5, 0)
    nothing = group_metrics(groups[1:], [np.zeros(3, np.float32)], global_steps=0, interval=1)
    assert (nothing["critic/score/mean"], nothing["critic/rewards/max"], nothing["rollout/solve_none"]) == (0, 0, 0)


def test_what_episodes_measured_is_a_mean_over_those_that_did() -> None:
    measured = [{"turns": 2.0, "calls": 3.0}, {"turns": 5.0}, {}]
    trajectories = [replace(make_trajectory([1], [2]), agent_metrics=metrics) for metrics in measured]
    metrics = group_metrics([make_group(0, trajectories)], [np.zeros(3, np.float32)], global_steps=0, interval=1)
    assert {name: value for name, value in metrics.items() if name.startswith("agent/")} == {
        "agent/calls": 3.0,
        "agent/turns": 3.5,
    }


def test_a_step_whose_tokens_are_all_masked_has_no_staleness() -> None:
    groups = [make_group(0, [make_trajectory([1], [2], loss_mask=[False])])]
    metrics = group_metrics(groups, [np.zeros(1, np.float32)], global_steps=9, interval=1)
    assert (metrics["staleness/max"], metrics["staleness/min"], metrics["staleness/mean"]) == (0, 0, 0)


def test_spanning_is_about_versions_not_about_spans() -> None:
    assert not is_spanning(make_trajectory([1], [2, 3], spans=(VersionSpan(0, 1, 5), VersionSpan(1, 2, 5))))
    assert is_spanning(make_trajectory([1], [2, 3], spans=(VersionSpan(0, 1, 4), VersionSpan(1, 2, 5))))
    assert not is_spanning(make_trajectory([1], [], spans=(), finish_reason="abort"))
