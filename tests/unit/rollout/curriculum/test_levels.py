"""The levels of rows by a column."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.curriculum.levels import MOST_LEVELS, ColumnError, levels_of


def levels(*values: object, **more: bool) -> list[int]:
    return levels_of([{"info": {"level": value}} for value in values], "info.level", **more)


def test_numbers_ascend_and_text_that_is_a_number_is_one() -> None:
    assert levels(3, 1, 20, 3) == [1, 0, 2, 1]
    assert levels("10", "9", 9.0) == [1, 0, 0]
    assert levels(0, *[1] * 98, 2) == [0, *[1] * 98, 2], "a few values are a level each, however rare"


def test_other_text_has_a_level_for_each_value_unless_an_order_is_needed() -> None:
    assert levels("hard", "easy", "hard", "2") == [2, 1, 2, 0]
    with pytest.raises(
        ColumnError, match=r"column 'info.level' must be a number, from easy to hard, is 'hard'"
    ) as error:
        levels(1, "hard", needs_numbers=True)
    assert error.value.place == 1


@pytest.mark.parametrize("value", ["n/a", "nan"])
def test_one_text_among_many_numbers_is_named(value: str) -> None:
    with pytest.raises(ColumnError, match=f"column 'info.level' is '{value}' here, and a number in other") as error:
        levels(*range(700), value, *range(300))
    assert error.value.place == 700


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("NaN"), 10**400])
def test_a_number_that_is_not_finite_is_named(value: object) -> None:
    with pytest.raises(ColumnError, match="must be text or a finite number") as error:
        levels(1, "easy", value)
    assert error.value.place == 2


def test_decimals_are_numbers() -> None:
    assert levels(Decimal("1.5"), Decimal("0.5"), 1) == [2, 0, 1]


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300))
def test_many_numbers_are_a_few_levels_that_ascend_without_a_gap(values: list[float]) -> None:
    found = levels(*values)
    assert set(found) == set(range(max(found) + 1)) and max(found) < MOST_LEVELS
    pairs = sorted(zip(values, found, strict=True))
    assert [level for _, level in pairs] == sorted(found)
    assert len(dict.fromkeys(pairs)) == len(set(values))  # equal numbers have one level


def test_many_different_numbers_are_divided_evenly() -> None:
    found = levels(*range(1000, 0, -1))
    assert [found.count(level) for level in range(MOST_LEVELS)] == [100] * MOST_LEVELS


@pytest.mark.parametrize(
    ("row", "problem"),
    [({}, "no column 'info.level'"), ({"info": 3}, "no column"), ({"info": {"level": None}}, "must be text or a num")],
)
def test_a_row_without_the_column_is_named(row: dict[str, object], problem: str) -> None:
    with pytest.raises(ColumnError, match=problem) as error:
        levels_of([{"info": {"level": 1}}, row], "info.level")
    assert error.value.place == 1
