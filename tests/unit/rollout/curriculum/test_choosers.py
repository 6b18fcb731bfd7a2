"""What each order promises: epochs, stages, second visits, and that no row is left out for ever."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.curriculum.adaptive import Adaptive
from rollout.curriculum.choosers import CANDIDATES, STAGE_GROUPS, SWEEP, Custom
from rollout.curriculum.order import Uniform
from rollout.curriculum.passes import PassRates
from tests.support.curricula import FAILED, PASSED, drawn, make_adaptive
from tests.support.rollouts import make_rows


def played(order: Adaptive, ordinals: range, rewards: dict[int, list[float]]) -> list[int]:
    """Draw one prompt after the other, each with the rewards of its row, and return the rows."""
    rows: list[int] = []
    for ordinal in ordinals:
        rows += drawn(order, range(ordinal, ordinal + 1))
        order.tell(ordinal, rewards[rows[-1]])
    return rows


# -- frontier ----------------------------------------------------------------------------------------------------------


def test_frontier_draws_what_the_policy_can_just_about_solve() -> None:
    order = make_adaptive("frontier", 30, half_life=1e6)
    kinds = {0: [1.0] * 8, 1: [1.0, 0.0] * 4, 2: [0.0] * 8}
    rows = played(order, range(2000), {row: kinds[row % 3] for row in range(30)})
    counts = Counter(row % 3 for row in rows[1000:])
    assert counts[1] > 850 and min(counts[0], counts[2]) > 10


def test_frontier_draws_rows_that_it_has_not_seen_before_those_that_are_solved() -> None:
    order = make_adaptive("frontier", 40, half_life=1e6)
    seen = played(order, range(30), dict.fromkeys(range(40), [1.0] * 8))
    assert len(set(seen)) > 22  # of 30 draws at random 21 are different


@settings(deadline=None, max_examples=20)
@given(num_rows=st.integers(1, 12), hated=st.integers(0, 11), seed=st.integers(0, 99))
def test_frontier_starves_no_row_for_ever(num_rows: int, hated: int, seed: int) -> None:
    """Not even one that has always failed while all others are at the frontier, with nothing ever forgotten."""
    hated %= num_rows
    order = make_adaptive("frontier", num_rows, seed=seed, half_life=1e9)
    rewards = dict.fromkeys(range(num_rows), [1.0, 0.0] * 50) | {hated: [0.0] * 100}
    rows = played(order, range(3 * SWEEP * num_rows), rewards)
    for start in range(0, len(rows), SWEEP * num_rows):
        assert hated in rows[start : start + SWEEP * num_rows]


def test_frontier_leaves_out_rows_that_are_under_way_while_there_are_others() -> None:
    order = make_adaptive("frontier", 8)
    assert sorted(drawn(order, range(8))) == list(range(8))
    assert len(drawn(order, range(8, 12))) == 4  # all are under way


def test_frontier_compares_some_rows_where_there_are_many() -> None:
    order = make_adaptive("frontier", 50 * CANDIDATES)
    assert len(set(drawn(order, range(200)))) > 150


# -- stages ------------------------------------------------------------------------------------------------------------


def test_a_stage_begins_once_the_one_before_passes_often_enough_and_the_last_one_ends_in_all_rows() -> None:
    order = make_adaptive("stages", 6, pass_rate=0.75)
    half = [1.0, 0.0]
    first = played(order, range(200), dict.fromkeys(range(6), half))
    assert {row % 3 for row in first} == {0} and order.gauges()["curriculum/stage"] == 0
    rest = played(order, range(200, 200 + 3 * STAGE_GROUPS + 60), dict.fromkeys(range(6), PASSED))
    stages = [row % 3 for row in rest]
    # A half of the window passes once its older half has gone.
    begun = [stages.index(stage) for stage in (1, 2)]
    assert begun == [STAGE_GROUPS // 2, STAGE_GROUPS // 2 + STAGE_GROUPS]
    assert set(stages[: begun[0]]) == {0} and set(stages[begun[0] : begun[1]]) == {1}
    assert set(stages[-50:]) == {0, 1, 2} and order.gauges()["curriculum/stage"] == 3


def test_within_a_stage_every_row_comes_before_any_comes_again() -> None:
    order = make_adaptive("stages", 21)
    rows = played(order, range(28), dict.fromkeys(range(21), FAILED))
    for start in range(0, 28, 7):
        assert sorted(rows[start : start + 7]) == list(range(0, 21, 3))


def test_a_group_of_an_earlier_stage_that_ends_late_does_not_count() -> None:
    order = make_adaptive("stages", 6)
    drawn(order, range(STAGE_GROUPS + 9))
    for ordinal in range(STAGE_GROUPS):
        order.tell(ordinal, PASSED)
    assert order.state([]).cursor.stage == 1
    for ordinal in range(STAGE_GROUPS, STAGE_GROUPS + 9):
        order.tell(ordinal, FAILED)
    assert order.state([]).cursor.window == ()


# -- retry -------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(num_rows=st.integers(1, 15), after=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
def test_retry_draws_every_row_once_per_epoch_and_those_that_failed_once_more(
    num_rows: int, after: int, seed: int, data: st.DataObject
) -> None:
    failing = data.draw(st.sets(st.integers(0, num_rows - 1)))
    order = make_adaptive("retry", num_rows, seed=seed, after=after)
    uniform = Uniform(num_rows, seed)
    rewards = {row: FAILED if row in failing else PASSED for row in range(num_rows)}
    epochs: list[int] = []
    again: dict[int, int] = {}
    for ordinal in range(6 * num_rows + 40):
        (row,) = played(order, range(ordinal, ordinal + 1), rewards)
        cursor = order.state([]).cursor
        if cursor.last_again == ordinal:
            again[ordinal] = row
        else:
            epochs.append(row)
    assert epochs == [uniform.row(place) for place in range(len(epochs))]
    assert set(again.values()) <= failing
    assert not any(ordinal + 1 in again for ordinal in again)  # half of the draws at most
    whole = len(epochs) // num_rows
    for row in failing:
        assert sum(row == other for other in again.values()) <= whole + 1


def test_a_prompt_that_failed_comes_back_after_so_many_others() -> None:
    order = make_adaptive("retry", 100, after=7)
    (first,) = played(order, range(1), dict.fromkeys(range(100), FAILED))
    rest = played(order, range(1, 30), dict.fromkeys(range(100), PASSED))
    assert rest.index(first) == 7 and rest.count(first) == 1


def test_one_response_that_passes_is_enough() -> None:
    order = make_adaptive("retry", 100, after=2)
    rows = played(order, range(60), dict.fromkeys(range(100), [0.0, 0.0, 1.0]))
    assert len(set(rows)) == 60


# -- a user's function -------------------------------------------------------------------------------------------------


def order_of(function: Any, passes: PassRates) -> Adaptive:
    """Make the order of a user's function over three rows."""
    return Adaptive("my:order", Custom("my:order", function, make_rows(3)), passes, seed=0, pass_reward=0.5)


@pytest.mark.parametrize("answer", [-1, 3, 1.0, None])
def test_a_function_that_names_no_row_is_an_error_that_names_the_key(answer: object) -> None:
    order = order_of(lambda rows, passes, random: answer, PassRates(3, half_life=10.0))
    with pytest.raises(ValueError, match=r"order=my:order: must return the number of a row, from 0 to 2, and"):
        order.draw(0)


def test_a_function_sees_rows_and_what_became_of_them() -> None:
    order = make_adaptive("tests.support.curricula:fewest_visits", 6)
    rows = played(order, range(30), dict.fromkeys(range(6), PASSED))
    assert Counter(rows) == dict.fromkeys(range(6), 5) and rows[:6] != rows[6:12]


def test_a_function_may_answer_with_a_number_of_numpy() -> None:
    order = order_of(lambda rows, passes, random: np.int64(2), PassRates(3, half_life=10.0))
    assert drawn(order, range(2)) == [2, 2]


def test_a_function_cannot_change_what_it_is_shown() -> None:
    passes = PassRates(3, half_life=10.0)

    def meddling(rows: Any, seen: Any, random: Any) -> int:
        seen.visits[:] = 7
        return 0

    with pytest.raises(RuntimeError, match=r"data.curriculum.order=my:order: has raised ValueError: .*read-only"):
        order_of(meddling, passes).draw(0)
    assert not passes.visits.any()
