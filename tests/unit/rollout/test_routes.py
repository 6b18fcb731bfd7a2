"""The rows of experts stay with the inputs that they are of, however answers are joined, cut, placed and stored."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.replica.answers import Answers
from rollout.types import Completion, Routes, TokenSequence
from tests.support.fakes import make_completion
from tests.support.routes import input_rows, routed_group, rows_of, some_routes
from tests.support.sequences import only

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


@st.composite
def groups_rows(draw: st.DrawFn) -> tuple[int, list[Rows | None]]:
    """Draw the length of a prompt, and the rows of sequences: most have those of one prompt, up to some place."""
    num_prompt = draw(st.integers(1, 5))
    prompt = draw(st.lists(st.none() | st.integers(0, 3), min_size=num_prompt, max_size=num_prompt))
    sequences: list[Rows | None] = []
    for _ in range(draw(st.integers(1, 4))):
        rows = [*prompt, *draw(st.lists(st.none() | st.integers(0, 3), max_size=4))]
        for place in draw(st.lists(st.integers(0, num_prompt - 1), max_size=1)):
            rows[place] = 30  # other weights, or another rounding, sent it elsewhere
        sequences.append(draw(st.sampled_from([rows, rows, rows, None])))
    return num_prompt, sequences


@given(drawn=groups_rows())
def test_a_group_has_the_rows_of_its_prompt_once_and_every_sequence_its_own(
    drawn: tuple[int, list[Rows | None]],
) -> None:
    whole = routed_group(*drawn)
    shared = pickle.loads(pickle.dumps(whole.with_shared_routes()))
    assert input_rows(shared) == input_rows(whole)
    sequences = [only(trajectory) for trajectory in shared.trajectories]
    first = next((rows for rows in drawn[1] if rows is not None), None)
    for sequence, rows in zip(sequences, drawn[1], strict=True):
        same = 0 if rows is None or first is None else _num_same(first[: drawn[0]], rows)
        assert sequence.num_prompt_routes == same, "and none where the first row differs"
    assert len({id(each.prompt_routes.experts) for each in sequences if each.prompt_routes is not None}) <= 1


def _num_same(first: Rows, rows: Rows) -> int:
    return next((place for place, row in enumerate(first) if row != rows[place]), len(first))


@given(answers=st.lists(st.tuples(st.integers(1, 4), st.none() | st.lists(st.none() | st.integers(0, 2), max_size=6))))
def test_answers_of_one_call_come_as_they_were_sent(answers: list[tuple[int, Rows | None]]) -> None:
    whole = [completion(*answer) for answer in answers]
    read = pickle.loads(pickle.dumps(Answers.of(whole))).completions()
    assert [rows_of(each.routes) for each in read] == [rows_of(each.routes) for each in whole]
    assert [each.routes is None for each in read] == [each.routes is None for each in whole]
    assert [each.token_ids.tolist() for each in read] == [each.token_ids.tolist() for each in whole]


def test_answers_of_one_call_bring_their_prompt_once() -> None:
    prompt = list(range(40)) * 25
    sizes = [len(pickle.dumps(Answers.of([completion(1, [*prompt, row]) for row in range(size)]))) for size in (1, 8)]
    assert sizes[1] - sizes[0] < 7 * 1000, "seven answers more, and less than a byte of each token of the prompt"


def test_a_prompt_travels_once_whatever_the_size_of_the_group() -> None:
    prompt = list(range(40)) * 25
    one, eight = (len(pickle.dumps(routed_group(1000, [[*prompt, 3]] * size).with_shared_routes())) for size in (1, 8))
    without = [len(pickle.dumps(routed_group(1000, [None] * size))) for size in (1, 8)]
    assert eight - one < without[1] - without[0] + 7 * 400, "what each has besides, and less than a row of each token"


def test_what_lacks_its_first_rows_keeps_what_it_has() -> None:
    group = routed_group(2, [[1, 2, 3], [1, 2, 4]])
    late = replace(only(group.trajectories[1]), routes=some_routes([2, 4]))
    group = replace(group, trajectories=(group.trajectories[0], replace(group.trajectories[1], sequences=(late,))))
    assert input_rows(group.with_shared_routes()) == [[1, 2, 3], [2, 4]]
    assert only(group.with_shared_routes().trajectories[1]) is late


def test_a_greedy_trajectory_which_is_not_trained_has_no_routes() -> None:
    group = routed_group(2, [[1, 2, 3], [1, 2, 4]])
    with_greedy = replace(group, greedy=group.trajectories[0]).with_shared_routes()
    assert with_greedy.greedy is not None and only(with_greedy.greedy).input_routes is None


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_an_expert_with_the_number_of_the_unknown_is_known(dtype: type[np.unsignedinteger]) -> None:
    last = np.iinfo(dtype).max
    routes = Routes(experts=np.array([[[last, 3]], [[last, last]]], dtype))
    assert routes.is_known.tolist() == [True, False]
