"""Prompts are compared with the render of their history, and not too often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat.verification import Cause, is_check_due, mismatch


def letters(ids: list[int]) -> str:
    """Decode ids: 0 to 25 are letters, 26 is "ab" in one token."""
    return "".join("ab" if token_id == 26 else chr(97 + token_id) for token_id in ids)


A, B, C, D, E, AB = 0, 1, 2, 3, 4, 26
PROMPT = [C, A, B, D, D, E, A]  # c, ab, [dd sampled], e, a
SPANS = [(3, 5)]


@pytest.mark.parametrize(
    ("rendered", "cause"),
    [
        ([C, A, B, D, D, E, A], None),
        ([C, A, B, E, A], None),  # the template dropped the answer's reasoning
        ([C, A, B, C, E, A, C, E, A], None),
        ([C, AB, D, D, E, A], Cause.retoken),
        ([C, B, D, D, E, A], Cause.template),
        ([C, A, B, D, D, E, B], Cause.template),
        ([C, A, B, D, D, E, A, A], Cause.template),
        ([A, C, A, B, D, D, E, A], Cause.template),
    ],
)
def test_only_what_was_sampled_may_differ(rendered: list[int], cause: Cause | None) -> None:
    assert mismatch(PROMPT, SPANS, rendered, letters) is cause


def test_what_is_between_two_answers_may_not_differ() -> None:
    assert mismatch([A, B, C, D, E], [(1, 2), (3, 4)], [A, B, B, D, E], letters) is Cause.template


@pytest.mark.parametrize("spans", [[(3, 5), (4, 6)], [(5, 3)], [(3, 8)]])
def test_spans_that_do_not_ascend_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="do not ascend within 7 tokens"):
        mismatch(PROMPT, spans, PROMPT, letters)


@given(turns=st.lists(st.integers(1, 300), min_size=1, max_size=200), limit=st.integers(1, 2000))
def test_all_checks_of_a_session_are_linear_in_its_length(turns: list[int], limit: int) -> None:
    """Checks come every turn up to the limit; after that all of them cost at most three times the final length."""
    early, late, length = 0, 0, 0
    for tokens in turns:
        parent, length = length, length + tokens
        due = is_check_due(parent, length, limit)
        if length <= limit:
            early += due
        elif due:
            late += length
    assert early == sum(sum(turns[: index + 1]) <= limit for index in range(len(turns)))
    assert late <= 3 * length


def test_a_long_session_is_checked_when_its_length_doubles() -> None:
    lengths = [length for length in range(100, 6500, 100) if is_check_due(length - 100, length, 800)]
    assert lengths == [*range(100, 900, 100), 1600, 3200, 6400]
