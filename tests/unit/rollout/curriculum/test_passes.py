"""The posterior of pass rates: what it starts from, what it learns, and how it forgets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.curriculum.passes import PassRates


def test_a_row_that_was_never_seen_has_the_largest_variance() -> None:
    passes = PassRates(3, half_life=1000.0)
    passes.tell(0, passed=4, failed=4)
    passes.tell(1, passed=8, failed=0)
    assert passes.rate() == pytest.approx([0.5, 8.5 / 9, 0.5], abs=2e-3)
    assert passes.variance()[2] == 0.25 > passes.variance()[1]


@given(passed=st.integers(0, 9), failed=st.integers(0, 9), half_life=st.floats(0.5, 500), later=st.integers(0, 2000))
def test_what_was_seen_a_half_life_ago_counts_half(passed: int, failed: int, half_life: float, later: int) -> None:
    passes = PassRates(2, half_life)
    passes.tell(0, passed, failed)
    for _ in range(min(later, 50)):
        passes.tell(1, 1, 0)
    passes.clock = 1 + later
    weight = 0.5 ** (later / half_life)
    expected = (0.5 + passed * weight) / (1 + (passed + failed) * weight)
    assert passes.rate(np.array([0], np.int32))[0] == pytest.approx(expected, rel=1e-5)


def test_what_was_seen_late_weighs_more_than_what_was_seen_early() -> None:
    passes = PassRates(1, half_life=1.0)
    passes.tell(0, passed=0, failed=8)
    for _ in range(20):
        passes.tell(0, passed=8, failed=0)
    assert passes.rate()[0] > 0.95


def test_rows_of_a_pool_tell_of_those_that_were_never_drawn() -> None:
    passes = PassRates(6, half_life=1000.0, pools=[0, 0, 0, 1, 1, 1])
    for row in (0, 1):
        passes.tell(row, passed=8, failed=0)
    passes.tell(3, passed=4, failed=4)
    assert passes.rate()[2] > 0.95 and passes.rate()[5] == pytest.approx(0.5, abs=0.01)
    assert passes.variance()[5] > 5 * passes.variance()[2]
    passes.tell(2, passed=0, failed=8)  # it is the one hard row of an easy pool
    assert passes.rate()[2] < 0.2 < passes.rate()[0]


@given(tells=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 8)), max_size=60))
def test_a_rate_is_never_0_or_1(tells: list[tuple[int, int, int]]) -> None:
    passes = PassRates(4, half_life=30.0, pools=[0, 0, 1, 1])
    for row, passed, failed in tells:
        passes.tell(row, passed, failed)
    assert ((passes.rate() > 0) & (passes.rate() < 1)).all()
