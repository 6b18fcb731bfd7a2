"""A run that ends at any moment and goes on in another: every prompt is trained once, and what was sampled is kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import AlgorithmConfig
from rollout.curriculum.order import OtherPromptsError
from rollout.progress import PartialCompletion
from rollout.prompts import PromptStream
from rollout.snapshot import Ready, UnderWay, capture, decode, encode, restore
from rollout.types import DiscardReason, KeptTokens, TrajectoryGroup
from tests.support.fakes import make_completion, make_group, make_trajectory, run_virtual
from tests.support.rollouts import GROUPS_PER_STEP, NUM_STEPS, CheckpointedRun, make_rows
from tests.support.routes import input_rows, routed_group, rows_of, some_routes
from tests.support.sequences import only


def _with(**values: Any) -> Callable[[Ready], Ready]:
    """Return a function that sets fields of the trajectories of a group, or `kept` of their sequences."""
    of_sequences = {name: values.pop(name) for name in ("kept",) if name in values}

    def changed(ready: Ready) -> Ready:
        made = ((replace(only(each), **of_sequences), each) for each in ready.trajectories)
        return replace(ready, trajectories=tuple(replace(each, sequences=(its,), **values) for its, each in made))

    return changed


def trained_by(*runs: CheckpointedRun) -> list[int]:
    return sorted(ordinal for run in runs for of_step in run.trained.values() for ordinal in of_step)


@settings(max_examples=60, deadline=None)
@given(
    seconds=st.lists(st.sampled_from([0.0, 0.5, 3.0, 30.0]), min_size=1, max_size=9),
    max_staleness=st.integers(0, 3),
    cuts=st.lists(st.integers(1, NUM_STEPS - 1), max_size=3, unique=True).map(sorted),
)
def test_cut_anywhere_every_prompt_is_trained_once_and_goes_on_from_its_tokens(
    seconds: list[float], max_staleness: int, cuts: list[int]
) -> None:
    async def main() -> None:
        trained: list[int] = []
        state, before = None, None
        for start, end in zip([0, *cuts], [*cuts, NUM_STEPS], strict=True):
            run = CheckpointedRun(seconds, max_staleness, global_steps=start)
            if state is not None and before is not None:
                assert restore(state, run.rollouter) == 0
                resumed = run.rollouter.under_way
                assert list(resumed) == [group.ordinal for group in state.under_way] == list(before.told)
                for ordinal, group in resumed.items():
                    told = [*group.attempt.partials[0, 0].completion.token_ids] if group.attempt.partials else []
                    assert told == before.told[ordinal]
            state = await run.until(end)
            before = run
            trained += [ordinal for step in range(start, end) for ordinal in run.trained[step]]
            for ordinal, attempt in zip(run.rollouter.under_way, run.runner.attempts, strict=False):
                assert attempt.number == 0, ordinal
        assert sorted(trained) == list(range(NUM_STEPS * GROUPS_PER_STEP))

    run_virtual(main())


@pytest.mark.parametrize("change", [{"max_staleness": 0}, {"group_size": 2}])
async def test_what_does_not_fit_another_bound_is_sampled_anew_and_comes_first(change: dict[str, int]) -> None:
    first = CheckpointedRun([1.0, 9.0, 3.0], max_staleness=3)
    state = await first.until(2)
    run = replace(CheckpointedRun([1.0], max_staleness=3, global_steps=2), **change)
    untrained = {group.ordinal for group in state.ready} | {group.ordinal for group in state.under_way}
    given_back = restore(state, run.rollouter)
    assert given_back == len(run.rollouter.stream.returned) > 0
    if "group_size" in change:
        assert given_back == len(untrained)
    await run.until(NUM_STEPS)
    assert trained_by(first, run) == list(range(NUM_STEPS * GROUPS_PER_STEP))


async def test_prompts_that_were_given_back_and_not_dispatched_again_are_in_the_next_checkpoint() -> None:
    """The first run resumes with a tighter bound, which gives prompts back, and ends before it dispatches them."""
    first = CheckpointedRun([1.0, 9.0, 3.0], max_staleness=3)
    state = await first.until(2)
    between = CheckpointedRun([1.0], max_staleness=0, global_steps=2)
    assert restore(state, between.rollouter) > 0
    returned = list(between.rollouter.stream.returned)
    again = decode(encode(capture(between.rollouter)))
    assert list(again.returned) == returned != []
    last = CheckpointedRun([1.0], max_staleness=0, global_steps=2)
    assert restore(again, last.rollouter) == 0
    assert last.rollouter.stream.returned == returned and last.rollouter.stream.ordinal == state.next_ordinal
    await last.until(NUM_STEPS)
    assert trained_by(first, last) == list(range(NUM_STEPS * GROUPS_PER_STEP))


async def test_a_run_that_is_resumed_with_fewer_steps_knows_what_it_had_begun_and_did_not_need() -> None:
    first = CheckpointedRun([9.0, 1.0, 1.0], max_staleness=3)
    state = await first.until(2)
    run = CheckpointedRun([9.0, 1.0], max_staleness=3, global_steps=2, num_steps=3)
    restore(state, run.rollouter)
    await run.until(3)
    left_over = run.rollouter.left_over()
    assert {group.reason for group in left_over} == {DiscardReason.unneeded}
    ordinals = [group.prompt.ordinal for group in left_over]
    assert sorted([*trained_by(first, run), *ordinals]) == list(range(state.next_ordinal))


@pytest.mark.parametrize("changed", ["seed", "rows", "answer"])
def test_other_prompts_are_refused(changed: str) -> None:
    run = CheckpointedRun([1.0])
    state = capture(run.rollouter)
    rows = make_rows(4 if changed == "rows" else 5)
    if changed == "answer":
        rows[2] = replace(rows[2], ground_truth="other")
    other = PromptStream(rows, seed=4 if changed == "seed" else 3)
    with pytest.raises(OtherPromptsError, match="not those of the data and the seed"):
        restore(state, replace(run.rollouter, stream=other))


def test_the_state_survives_its_encoding() -> None:
    run = CheckpointedRun([1.0])
    assert run.rollouter.buffer.adopt(make_group(3, 0, 0, 1, group_size=2))
    run.rollouter.buffer.failures.failed_groups = [9]
    run.rollouter.stream.ordinal = 2
    run.rollouter.buffer.failures.failed_rewards = 2
    run.rollouter.counters["moved"] = 7
    state = capture(run.rollouter)
    again = decode(encode(state))
    assert again.ready[0].ordinal == 3 and again.failed_groups == (9,) and again.failed_rewards == 2
    old, new = state.ready[0].trajectories[1], again.ready[0].trajectories[1]
    for name in ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs"):
        np.testing.assert_array_equal(getattr(only(new), name), getattr(only(old), name), strict=True)
    assert (only(new).spans, new.reward, new.finish_reason) == (only(old).spans, old.reward, old.finish_reason)
    other = CheckpointedRun([1.0])
    restore(again, other.rollouter)
    assert other.rollouter.counters["moved"] == 7 and other.rollouter.buffer.failures.failed_groups == [9]
    assert other.rollouter.buffer.failures.failed_rewards == 2


def test_prompts_are_the_streams_again_whatever_their_rows_hold() -> None:
    rows = [replace(row, extra={"x": object()}) for row in make_rows(5)]
    runs = [CheckpointedRun([1.0]), CheckpointedRun([1.0])]
    for run in runs:
        run.rollouter.stream = PromptStream(rows, seed=3)
    group = replace(make_group(3, 0, group_size=4), prompt=runs[0].rollouter.stream.at(3), greedy=make_trajectory(0))
    assert runs[0].rollouter.buffer.adopt(group)
    runs[0].rollouter.stream.ordinal = 1
    assert restore(decode(encode(capture(runs[0].rollouter))), runs[1].rollouter) == 0
    (again,) = runs[1].rollouter.buffer.ready
    assert again.prompt == group.prompt and len(again.trajectories) == 4 and again.greedy is not None


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ValueError):
        decode(b"rubbish")
    with pytest.raises(TypeError, match="a checkpoint cannot hold a object"):
        encode(replace(capture(CheckpointedRun([1.0]).rollouter), counters={"moved": object()}))  # pyright: ignore


def test_what_was_restored_and_not_dispatched_yet_is_kept_by_the_next_checkpoint() -> None:
    run = CheckpointedRun([1.0])
    had = PartialCompletion(prompt_checksum=5, completion=make_completion([7], [0], ""))
    first = capture(run.rollouter)
    under_way = UnderWay(ordinal=0, claimed_version=0, failures=0, partials={(0, 0): had})
    first = replace(first, next_ordinal=1, under_way=(under_way,))
    assert restore(first, run.rollouter) == 0
    (kept,) = capture(run.rollouter).under_way
    assert kept.partials[0, 0].completion.token_ids.tolist() == [7]
    assert run.rollouter.under_way[0].attempt.number == 0


def test_what_environments_said_is_in_a_checkpoint_and_one_without_it_is_read() -> None:
    routed = replace(make_completion([7], [0], ""), routes=some_routes([3, None, 5]))
    had = PartialCompletion(prompt_checksum=5, completion=routed)
    heard = replace(had, observed=np.array([8, 9], np.int32))
    under_way = UnderWay(ordinal=0, claimed_version=0, failures=0, partials={(0, 0): had, (0, 1): heard})
    data = encode(replace(capture(CheckpointedRun([1.0]).rollouter), next_ordinal=1, under_way=(under_way,)))
    partials = decode(data).under_way[0].partials
    assert rows_of(partials[0, 0].completion.routes) == [3, None, 5]
    observed = partials[0, 1].observed
    assert partials[0, 0].observed is None and observed is not None and observed.tolist() == [8, 9]
    raw = msgspec.msgpack.decode(data)
    for _, partial in raw["under_way"][0]["partials"].items():
        del partial["observed"]
    old = decode(msgspec.msgpack.encode(raw)).under_way[0].partials
    assert [partial.observed for partial in old.values()] == [None, None]
    assert old[0, 1].completion.token_ids.tolist() == [7]


def test_the_routes_of_a_prompt_are_once_in_a_checkpoint_and_stay_one_object() -> None:
    group = routed_group(400, [[*([9] * 400), row] for row in range(4)])
    state = capture(CheckpointedRun([1.0]).rollouter)

    def encoded(some: TrajectoryGroup) -> bytes:
        return encode(replace(state, ready=(Ready(ordinal=0, trajectories=some.trajectories, greedy=None),)))

    (ready,) = decode(encoded(group.with_shared_routes())).ready
    read = replace(group, trajectories=ready.trajectories)
    assert input_rows(read) == input_rows(group)
    rows = [only(trajectory).prompt_routes for trajectory in read.trajectories]
    assert len({id(routes.experts) for routes in rows if routes is not None}) == 1 and None not in rows
    prompt_bytes = 400 * 2 * 3
    assert len(encoded(group)) - len(encoded(group.with_shared_routes())) > 2.9 * prompt_bytes
    assert input_rows(replace(group, trajectories=decode(encoded(group)).ready[0].trajectories)) == input_rows(group)


async def test_a_resumed_run_with_a_teacher_takes_only_groups_that_one_has_scored() -> None:
    """A teacher's logprobs are kept. Groups of a run without a teacher are sampled anew."""
    state = await CheckpointedRun([1.0], max_staleness=3).until(2)
    scored = np.array([-0.5, -2.5], np.float32)
    first, *others = state.ready
    trajectories = tuple(
        replace(trajectory, sequences=(replace(only(trajectory), teacher_logprobs=scored),))
        for trajectory in first.trajectories
    )
    state = decode(encode(replace(state, ready=(replace(first, trajectories=trajectories), *others))))
    run = CheckpointedRun([1.0], max_staleness=3, global_steps=2)
    run.rollouter.teacher = object()  # pyright: ignore[reportAttributeAccessIssue]
    assert restore(state, run.rollouter) == len(others) > 0
    (taken,) = run.rollouter.buffer.ready
    assert taken.prompt.ordinal == first.ordinal and taken.is_taught
    kept = only(taken.trajectories[0]).teacher_logprobs
    assert kept is not None and kept.tolist() == scored.tolist() and kept.dtype == np.float32


@pytest.mark.parametrize(
    ("algorithm", "has"),
    [
        (AlgorithmConfig(advantage="remax"), lambda ready: replace(ready, greedy=make_trajectory(0))),
        (AlgorithmConfig(advantage="gdpo", gdpo_weights={"a": 1, "b": 1}), _with(reward_metrics={"a": 0.0, "b": 1.0})),
        (AlgorithmConfig(advantage="maxrl"), _with(overlong_penalty=0.0)),
        (AlgorithmConfig(advantage="otb"), _with(kept=None)),
    ],
)
async def test_a_resumed_run_with_another_advantage_samples_anew_what_it_cannot_read(
    algorithm: AlgorithmConfig, has: Callable[[Ready], Ready]
) -> None:
    """The run before had grpo, a penalty for long responses and top-p. One of its groups has what is read now."""
    state = await CheckpointedRun([1.0], max_staleness=3).until(2)
    kept = KeptTokens(counts=np.array([1, 0], np.int32), token_ids=np.array([4], np.int32))
    first, *others = map(_with(kept=kept, overlong_penalty=-1.0, reward_metrics={"a": 0.0}), state.ready)
    piece = replace(make_completion([7], [0], ""), kept=kept.cut(0, 1))
    begun = replace(state.under_way[0], partials={(0, 0): PartialCompletion(prompt_checksum=5, completion=piece)})
    state = replace(state, ready=(has(first), *others), under_way=(begun, *state.under_way[1:]))
    run, same = (CheckpointedRun([1.0], max_staleness=3, global_steps=2).rollouter for _ in range(2))
    assert restore(state, same) == 0
    assert restore(state, run, algorithm) == len(others) + (algorithm.advantage == "otb") > 0
    assert [group.prompt.ordinal for group in run.buffer.ready] == [first.ordinal]
    assert (begun.ordinal in run.under_way) == (algorithm.advantage != "otb")
