"""The rows that records name are held against the order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.prompts import PromptStream
from scripts.observe.row_audit import RowAudit
from tests.support.rollouts import make_rows


def findings(rows: dict[int, int], *, is_uniform: bool = True) -> list[str]:
    audit = RowAudit()
    for ordinal, row in rows.items():
        audit.take(ordinal, row)
        audit.take(ordinal, None)
    return list(audit.findings(is_uniform=is_uniform))


@given(num_rows=st.integers(1, 12), length=st.integers(0, 50), gaps=st.sets(st.integers(0, 49), max_size=5))
def test_a_uniform_run_has_no_finding_however_far_it_came(num_rows: int, length: int, gaps: set[int]) -> None:
    stream = PromptStream(make_rows(num_rows), seed=1)
    rows = {prompt.ordinal: prompt.row or 0 for prompt in (stream.next() for _ in range(length))}
    assert findings({ordinal: row for ordinal, row in rows.items() if ordinal not in gaps}) == []


@pytest.mark.parametrize("is_uniform", [True, False])
def test_a_row_that_comes_twice_in_an_epoch_is_found_where_none_may(is_uniform: bool) -> None:
    rows = {0: 2, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    expected = ["prompts 4 and 5 of one epoch are both of row 2 of the data"]
    assert findings(rows, is_uniform=is_uniform) == (expected if is_uniform else [])


def test_an_ordinal_that_stands_for_two_rows_is_found() -> None:
    audit = RowAudit()
    audit.take(3, 1)
    audit.take(3, 4)
    assert list(audit.findings(is_uniform=False)) == ["prompt 3 is of the rows 1, 4 of the data"]
