"""An order that learns chooses the same rows whatever kills and resumes the run, and hears every outcome once."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.curriculum.order import CurriculumState, OtherPromptsError, Uniform
from rollout.prompts import PromptStream
from rollout.snapshot import RolloutState, capture, decode, encode, restore
from tests.support.curricula import FAILED, LEARNING, PASSED, drawn, make_adaptive
from tests.support.fakes import run_virtual
from tests.support.rollouts import GROUPS_PER_STEP, NUM_STEPS, CheckpointedRun, make_rows

Event = tuple[int, list[float]]
"""Which of the open ordinals ends, with its rewards; negative to draw another."""
EVENTS = st.lists(
    st.tuples(st.integers(-3, 3), st.lists(st.sampled_from([0.0, 0.4, 1.0]), max_size=4)), min_size=1, max_size=120
)


def through_a_checkpoint(state: CurriculumState) -> CurriculumState:
    """What a checkpoint keeps of it."""
    empty = capture(CheckpointedRun([1.0]).rollouter)
    again = decode(encode(replace(empty, curriculum=state))).curriculum
    assert again is not None
    return again


class Process:
    """A process of a run, with what the rest of its rollouts knows."""

    def __init__(self, name: str, num_rows: int):
        self.make = lambda: make_adaptive(name, num_rows)
        self.order = self.make()
        self.open: list[int] = []
        self.rows: list[int] = []

    def take(self, event: Event) -> None:
        which, rewards = event
        if which < 0 or not self.open:
            self.open.append(len(self.rows))
            self.order.draw(len(self.rows))
            self.rows.append(self.order.row(len(self.rows)))
        else:
            self.order.tell(self.open.pop(which % len(self.open)), rewards)

    def checkpoint(self) -> tuple[CurriculumState, list[int], list[int]]:
        return self.order.state(self.open), self.open.copy(), self.rows.copy()

    def resume(self, state: CurriculumState, open_ordinals: list[int], rows: list[int]) -> None:
        self.order, self.open, self.rows = self.make(), open_ordinals.copy(), rows.copy()
        self.order.restore(through_a_checkpoint(state))
        assert [self.order.row(ordinal) for ordinal in self.open] == [rows[ordinal] for ordinal in self.open]


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(LEARNING),
    num_rows=st.integers(1, 9),
    events=EVENTS,
    saves=st.sets(st.integers(0, 119)),
    kills=st.sets(st.integers(0, 119), max_size=4),
)
def test_any_kills_and_resumes_change_no_draw(
    name: str, num_rows: int, events: list[Event], saves: set[int], kills: set[int]
) -> None:
    undisturbed, killed = Process(name, num_rows), Process(name, num_rows)
    for event in events:
        undisturbed.take(event)
    saved_at, saved, done, kills = 0, killed.checkpoint(), 0, set(kills)
    while done < len(events):
        if done in saves:
            saved_at, saved = done, killed.checkpoint()
        killed.take(events[done])
        done += 1
        if done in kills:
            kills.remove(done)
            killed.resume(*saved)
            done = saved_at
    assert killed.rows == undisturbed.rows
    assert killed.order.gauges().keys() >= {"curriculum/visits"}
    _assert_equal(killed.order.state([]), undisturbed.order.state([]))


def _assert_equal(ours: CurriculumState, theirs: CurriculumState) -> None:
    assert (ours.clock, ours.open, ours.cursor) == (theirs.clock, theirs.open, theirs.cursor)
    for name in ("passed", "failed", "since"):
        np.testing.assert_array_equal(getattr(ours.of_rows, name), getattr(theirs.of_rows, name), strict=True)
        np.testing.assert_array_equal(getattr(ours.of_pools, name), getattr(theirs.of_pools, name), strict=True)


def test_a_state_is_a_copy_that_is_written_while_the_run_goes_on() -> None:
    order = make_adaptive("frontier", 5)
    drawn(order, range(3))
    state = order.state([0, 1, 2])
    before = msgspec.msgpack.encode(state, enc_hook=lambda array: array.tobytes())
    order.tell(0, PASSED)
    drawn(order, range(3, 9))
    assert msgspec.msgpack.encode(state, enc_hook=lambda array: array.tobytes()) == before


def test_a_checkpoint_keeps_the_rows_of_what_is_not_over_only() -> None:
    order = make_adaptive("frontier", 5)
    rows = drawn(order, range(100))
    for ordinal in range(100):
        order.tell(ordinal, PASSED)
    state = order.state([97, 99])
    assert (state.first, state.rows.tolist()) == (97, rows[97:])
    resumed = make_adaptive("frontier", 5)
    resumed.restore(state)
    assert resumed.row(97) == rows[97]
    with pytest.raises(LookupError, match="ordinal 96: its row is known from 97 to 99 only"):
        resumed.row(96)
    assert order.state([]).rows.tolist() == []


def test_a_second_outcome_of_an_ordinal_changes_nothing() -> None:
    """A group that was ready is sampled anew after a resume with another bound."""
    order = make_adaptive("retry", 3)
    drawn(order, range(1))
    order.tell(0, FAILED)
    before = order.state([])
    order.tell(0, FAILED)
    order.tell(0, PASSED)
    _assert_equal(order.state([]), before)


def test_a_group_without_rewards_is_over_and_says_nothing() -> None:
    order = make_adaptive("retry", 3)
    drawn(order, range(1))
    order.tell(0, [])
    state = order.state([])
    assert (state.clock, state.open, state.cursor.waiting) == (0, (), ())


@pytest.mark.parametrize(
    ("there", "here", "sentence"),
    [
        ("frontier", "uniform", "order=uniform: the prompts of the checkpoint were drawn with frontier"),
        ("uniform", "retry", "order=retry: the prompts of the checkpoint were drawn with uniform"),
        ("stages", "retry", "order=retry: the prompts of the checkpoint were drawn with stages"),
    ],
)
def test_a_checkpoint_of_another_order_is_refused(there: str, here: str, sentence: str) -> None:
    orders = {
        "uniform": lambda: Uniform(5, 3),
        **{name: lambda name=name: make_adaptive(name, 5) for name in ("frontier", "stages", "retry")},
    }
    with pytest.raises(OtherPromptsError, match=sentence):
        orders[here]().restore(orders[there]().state([]))


def test_a_checkpoint_with_another_column_is_refused() -> None:
    state = replace(make_adaptive("frontier", 5).state([]), pools=1)
    with pytest.raises(OtherPromptsError, match=r"data.curriculum.key: the checkpoint's column has other values"):
        make_adaptive("frontier", 5).restore(state)


def test_metrics_count_visits_and_judge_what_was_drawn() -> None:
    order = make_adaptive("retry", 4)
    rows = drawn(order, range(2))
    order.tell(0, PASSED)
    gauges = order.gauges()
    assert gauges["curriculum/visits"] == 2 and gauges["curriculum/visits_max"] == 1
    assert gauges["curriculum/unseen_fraction"] == 0.5 and gauges["curriculum/drawn_variance"] == 0.25
    assert gauges["curriculum/pass_rate"] == pytest.approx((2.5 / 3 + 0.5) / 2)
    assert "curriculum/drawn_variance" not in order.gauges() and len(set(rows)) == 2


# -- in the rollouts of a run ------------------------------------------------------------------------------------------


def learning_run(name: str, seconds: list[float], global_steps: int, group_size: int = 4) -> CheckpointedRun:
    run = CheckpointedRun(seconds, max_staleness=2, global_steps=global_steps, group_size=group_size)
    run.rollouter.stream = PromptStream(make_rows(5), seed=3, order=make_adaptive(name, 5))
    return run


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(LEARNING),
    seconds=st.lists(st.sampled_from([0.0, 0.5, 3.0, 30.0]), min_size=1, max_size=7),
    cuts=st.lists(st.integers(1, NUM_STEPS - 1), max_size=3, unique=True).map(sorted),
)
def test_cut_anywhere_every_ordinal_keeps_its_row_is_trained_once_and_told_once(
    name: str, seconds: list[float], cuts: list[int]
) -> None:
    async def main() -> None:
        rows: dict[int, int | None] = {}
        trained: list[int] = []
        state: RolloutState | None = None
        for start, end in zip([0, *cuts], [*cuts, NUM_STEPS], strict=True):
            run = learning_run(name, seconds, start)
            if state is not None:
                assert restore(state, run.rollouter) == 0
            for ordinal, group in run.rollouter.under_way.items():
                assert rows.setdefault(ordinal, group.prompt.row) == group.prompt.row
            state = await run.until(end)
            trained += [ordinal for step in range(start, end) for ordinal in run.trained[step]]
            assert state.curriculum is not None
            rows |= {group.ordinal: run.rollouter.stream.at(group.ordinal).row for group in state.under_way}
            assert set(state.curriculum.open) == {group.ordinal for group in state.under_way}
            assert state.curriculum.clock == state.next_ordinal - len(state.under_way)
        assert sorted(trained) == list(range(NUM_STEPS * GROUPS_PER_STEP))

    run_virtual(main())


async def test_a_group_that_is_sampled_anew_keeps_its_row() -> None:
    first = learning_run("frontier", [1.0, 9.0, 3.0], 0)
    state = await first.until(2)
    rows = {ready.ordinal: first.rollouter.stream.at(ready.ordinal).row for ready in state.ready}
    run = learning_run("frontier", [1.0], 2, group_size=2)
    assert restore(state, run.rollouter) >= len(rows) > 0
    again = [run.rollouter.stream.next() for _ in range(len(run.rollouter.stream.returned))]
    assert {prompt.ordinal: prompt.row for prompt in again}.items() >= rows.items()
