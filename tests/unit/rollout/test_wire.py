"""What is packed comes out as it was; a group is a few arrays on its way, whatever its size."""

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout.types import Completion, Trajectory, TrajectoryGroup
from rollout.wire import pack_completions, pack_group, unpack_completions, unpack_group
from tests.support.fakes import make_completion, make_prompt, make_trajectory

VERSIONS = st.lists(st.integers(0, 3), max_size=5).map(sorted)


def same(left: Any, right: Any) -> bool:
    """Arrays of the same dtype and values; every other field equal."""
    assert type(left) is type(right)
    for field in fields(left):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and np.array_equal(one, other), field.name
        else:
            assert one == other and type(one) is type(other), field.name
    return True


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    versions = draw(VERSIONS)
    return replace(
        make_trajectory(*versions),
        response_ids=np.array(
            draw(st.lists(st.integers(0, 9), min_size=len(versions), max_size=len(versions))), np.int32
        ),
        rollout_logprobs=-np.arange(len(versions), dtype=np.float32),
        loss_mask=np.arange(len(versions)) % 2 == 0,
        reward=draw(st.floats(0, 1)),
        reward_metrics=draw(st.sampled_from([{}, {"format": 0.5}])),
        error=draw(st.sampled_from([None, "TimeoutError"])),
        text=draw(st.text(max_size=3)),
    )


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    versions = draw(VERSIONS)
    return make_completion(range(len(versions)), versions, draw(st.sampled_from(["stop", "abort"])), len(versions))


@given(st.lists(completions(), max_size=4))
def test_completions_come_out_as_they_were(before: list[Completion]) -> None:
    after = unpack_completions(pickle.loads(pickle.dumps(pack_completions(before))))
    assert len(after) == len(before) and all(map(same, before, after))


@given(st.lists(trajectories(), min_size=1, max_size=4), st.none() | trajectories(), st.booleans())
def test_a_group_comes_out_as_it_was(before: list[Trajectory], greedy: Trajectory | None, one_prompt: bool) -> None:
    if not one_prompt:
        before = [replace(one, prompt_ids=np.arange(i, dtype=np.int32)) for i, one in enumerate(before)]
    group = TrajectoryGroup(prompt=make_prompt(3), trajectories=tuple(before), greedy=greedy)
    after = unpack_group(pickle.loads(pickle.dumps(pack_group(group))))
    assert after.prompt == group.prompt and len(after.trajectories) == len(before)
    assert all(map(same, before, after.trajectories))
    assert after.greedy is None if greedy is None else same(greedy, after.greedy)


def test_a_group_has_as_many_arrays_on_its_way_as_one_trajectory_and_its_prompt_once() -> None:
    prompt_ids = np.arange(1000, dtype=np.int32)
    trajectory = replace(make_trajectory(4, 4, 5), prompt_ids=prompt_ids)
    group = TrajectoryGroup(prompt=make_prompt(0), trajectories=(trajectory,) * 64)
    arrays: list[pickle.PickleBuffer] = []
    pickle.dumps(pack_group(group), protocol=5, buffer_callback=arrays.append)
    sizes = [array.raw().nbytes for array in arrays]
    assert len(sizes) == 4 and sizes.count(prompt_ids.nbytes) == 1
