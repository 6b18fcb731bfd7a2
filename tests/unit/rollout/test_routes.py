"""The rows of experts stay with the inputs that they are of, however answers are joined, cut, placed and stored."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.types import Completion, Routes, TokenSequence
from tests.support.fakes import make_completion
from tests.support.routes import rows_of, some_routes

Rows = list[int | None]
ROWS = st.lists(st.none() | st.integers(0, 40), max_size=6)


@st.composite
def answers(draw: st.DrawFn) -> tuple[int, Rows | None]:
    """Draw a number of tokens, and rows of as many inputs as there may be: none, fewer, or of the prompt too."""
    return draw(st.integers(0, 4)), draw(st.none() | ROWS)


def completion(num_tokens: int, rows: Rows | None) -> Completion:
    whole = make_completion(range(num_tokens), [5] * num_tokens, "stop")
    return whole if rows is None else replace(whole, routes=some_routes(rows))


def expected(parts: list[tuple[int, Rows | None]]) -> dict[int, int]:
    """Return the known rows by the place of the token that each input precedes; 0 is the first of the answer."""
    known: dict[int, int] = {}
    end = 0
    for num_tokens, rows in parts:
        end += num_tokens
        for place, row in zip(range(end - len(rows or ()), end), rows or (), strict=True):
            if row is not None:
                known.setdefault(place, row)
    return known


def shown(whole: Completion) -> dict[int, int]:
    rows = rows_of(whole.routes)
    return {place: row for place, row in enumerate(rows, whole.num_tokens - len(rows)) if row is not None}


@given(parts=st.lists(answers(), min_size=1, max_size=4), start=st.integers(0, 14))
def test_the_first_attempt_counts_and_prompts_fill_what_it_does_not_know(
    parts: list[tuple[int, Rows | None]], start: int
) -> None:
    whole = Completion.concatenate([completion(*part) for part in parts])
    known = expected(parts)
    assert shown(whole) == known
    assert (whole.routes is None) == all(rows is None for _, rows in parts)
    begin = start if start > 0 else -99  # all rows, or those of the rest
    assert shown(whole.after(start)) == {place - start: row for place, row in known.items() if place >= begin}


def test_a_turn_takes_from_the_next_ones_prompt_what_an_environment_said() -> None:
    first, said = completion(2, [0, 1, 2, 3]), completion(3, None)  # a prompt of three
    second = completion(1, [9, 9, 9, 9, 4, 5, 6, 7])
    sequence = TokenSequence.of([50, 51, 52], Completion.concatenate([first, said, second]))
    assert rows_of(sequence.routes) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_what_is_missing_in_front_is_unknown() -> None:
    assert rows_of(some_routes([7, None, 8]).of_inputs(5)) == [None, None, 7, None, 8]
    assert rows_of(some_routes([7]).of_inputs(1)) == [7]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_an_expert_with_the_number_of_the_unknown_is_known(dtype: type[np.unsignedinteger]) -> None:
    last = np.iinfo(dtype).max
    routes = Routes(experts=np.array([[[last, 3]], [[last, last]]], dtype))
    assert routes.is_known.tolist() == [True, False]
