"""The compact form of what sampling left is the rows that went into it, however it is cut, joined, picked and sent."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout.types import Completion, KeptTokens, TokenSequence
from tests.support.fakes import make_completion
from tests.support.kept import kept_of, rows_of

Rows = list[list[int] | None]
ROWS = st.lists(st.none() | st.lists(st.integers(0, 99), max_size=4, unique=True).map(sorted), max_size=6)


def shown(kept: KeptTokens | None, num_tokens: int = 0) -> Rows:
    if kept is None:
        return [[]] * num_tokens
    return [row if is_known else None for row, is_known in zip(rows_of(kept), kept.is_known, strict=True)]


def completion(rows: Rows | int) -> Completion:
    """Return a completion of tokens that were drawn from these rows; or, of so many, from the whole vocabulary."""
    num_tokens = rows if isinstance(rows, int) else len(rows)
    whole = make_completion(range(num_tokens), [5] * num_tokens, "stop")
    return whole if isinstance(rows, int) else replace(whole, kept=kept_of(rows))


@given(rows=ROWS, data=st.data())
def test_what_is_picked_and_cut_are_the_rows(rows: Rows, data: st.DataObject) -> None:
    kept = kept_of(rows)
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows)))))
    assert shown(kept.take(np.array(index, np.int64))) == [rows[place] for place in index]
    assert shown(kept.cut(start, end)) == rows[start:end]
    by_row = {None if row is None else tuple(row): number for row, number in zip(rows, kept.checksums(), strict=True)}
    assert len(set(by_row.values())) == len(by_row) and by_row.get((), 0) == 0


@given(parts=st.lists(ROWS | st.integers(0, 3), min_size=1, max_size=4), start=st.integers(0, 14))
def test_parts_of_an_answer_make_the_whole_and_the_rest_of_it(parts: list[Rows | int], start: int) -> None:
    whole = Completion.concatenate([completion(part) for part in parts])
    rows = [row for part in parts for row in ([[]] * part if isinstance(part, int) else part)]
    assert shown(whole.kept, whole.num_tokens) == rows
    assert (whole.kept is None) == all(isinstance(part, int) for part in parts)
    rest = whole.after(start)
    assert shown(rest.kept, rest.num_tokens) == rows[start:]


def test_a_token_of_which_nobody_knows_what_it_was_drawn_from_is_not_trained() -> None:
    mask = np.array([True, True, True, False])
    answer = completion([[1, 2], None, [], None])
    assert TokenSequence.of([7], answer, mask).loss_mask.tolist() == [True, False, True, False]
    assert TokenSequence.of([7], answer).loss_mask.tolist() == [True, False, True, False]
    assert TokenSequence.of([7], completion(2)).kept is None
