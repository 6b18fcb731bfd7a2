"""The levels of the rows of a data set by a column: from easy to hard where it holds numbers."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

MOST_LEVELS = 10
"""Numbers of more different values are divided into so many levels of about equal size."""
Cell = str | Real | Decimal


class ColumnError(ValueError):
    """A row lacks the column, or has a value there that cannot be used."""

    def __init__(self, problem: str, place: int = 0):
        super().__init__(problem)
        self.place = place
        """The number of the row."""


def levels_of(rows: Sequence[Mapping[str, Any]], column: str, *, needs_numbers: bool = False) -> list[int]:
    """Return the level of each row, from 0 without a gap. Text that is a number counts as one, and levels of numbers
    ascend. Other text has a level for each value; among many different numbers it is a mistake. Raises ColumnError.

    Example: levels_of([{"difficulty": 3}, {"difficulty": 1}, {"difficulty": 3}], "difficulty") == [1, 0, 1]

    Args:
        rows: the columns of each row.
        column: a dot reaches into a column.
        needs_numbers: refuse other text.
    """
    values = [_value(row, column, place) for place, row in enumerate(rows)]
    numbers = [_number(value) for value in values]
    if None not in numbers:
        return _ranked([number for number in numbers if number is not None])
    place = numbers.index(None)
    if needs_numbers:
        raise ColumnError(f"column {column!r} must be a number, from easy to hard, is {values[place]!r:.60}", place)
    if len(set(numbers)) > MOST_LEVELS + 1:  # as text, each would be a level of its own
        raise ColumnError(f"column {column!r} is {values[place]!r:.60} here, and a number in other rows", place)
    return _dense(list(map(str, values)))


def _ranked(numbers: Sequence[float]) -> list[int]:
    """Return levels of numbers: one for each value or, of many values, so that equal ones have the same."""
    if len(set(numbers)) <= MOST_LEVELS:
        return _dense(numbers)
    ordered = sorted(numbers)
    return _dense([bisect_left(ordered, number) * MOST_LEVELS // len(ordered) for number in numbers])


def _dense(values: Sequence[Any]) -> list[int]:
    """Return the place of each value among the different ones in their order."""
    order = {value: level for level, value in enumerate(sorted(set(values)))}
    return [order[value] for value in values]


def _value(row: Mapping[str, Any], column: str, place: int) -> Cell:
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ColumnError(f"no column {column!r}", place)
        value = value[name]
    if not isinstance(value, str | Real | Decimal):
        raise ColumnError(f"column {column!r} must be text or a number, is {type(value).__name__}", place)
    if not isinstance(value, str) and _number(value) is None:
        raise ColumnError(f"column {column!r} must be text or a finite number, is {value!r:.60}", place)
    return value


def _number(value: Cell) -> float | None:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
