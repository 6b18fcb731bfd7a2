"""Turns that are computed again: those that this replica had in its KV cache, under the same weights."""

import pytest

from rollout.replica import conversations
from rollout.replica.conversations import Conversations
from rollout.request_ids import RequestId
from rollout.types import GenerationRequest, SamplingParams
from tests.support.fakes import make_completion

PROMPT, ANSWER, SAID = (1,) * 200, (2,) * 4, (3,) * 500


def turn(
    turns: Conversations,
    number: int,
    cached: int = 0,
    *,
    version: int = 5,
    ordinal: int = 7,
    prompt: tuple[int, ...] = PROMPT,
) -> int:
    """Take in a turn of a conversation, in which a tool says more than all before. Returns how many were computed
    again."""
    request = GenerationRequest(
        request_id=RequestId(ordinal=ordinal, turn=number),
        prompt_ids=prompt + (ANSWER + SAID) * number,
        sampling=SamplingParams(),
    )
    turns.add(request, make_completion(ANSWER, [version] * len(ANSWER), "stop", cached))
    return turns.computed_again


@pytest.fixture
def turns() -> Conversations:
    """One that has found the prompt of another of the group in the cache."""
    made = Conversations()
    turn(made, 0, cached=192, ordinal=3)
    return made


def test_a_turn_of_which_the_cache_lost_most_is_computed_again(turns: Conversations) -> None:
    assert [turn(turns, 0), turn(turns, 1, cached=102)] == [0, 0], "the answer of the tool was never in the cache"
    assert [turn(turns, 2, cached=353), turn(turns, 3)] == [1, 2]
    assert turns.turns == 5


def test_turns_after_an_update_or_a_move_were_never_in_the_cache_for_these_weights(turns: Conversations) -> None:
    assert turn(turns, 3) == 0, "the turns before were elsewhere"
    assert turn(turns, 4, version=6) == 0, "no prefix is shared with other weights"
    assert turn(turns, 5, version=6) == 1


def test_another_conversation_of_the_same_session_is_not_one_that_was_lost(turns: Conversations) -> None:
    assert [turn(turns, 0), turn(turns, 1, prompt=(9,) * 300), turn(turns, 2)] == [0, 0, 0]


def test_where_nothing_is_ever_in_the_cache_or_less_than_a_few_blocks_nothing_is_lost(turns: Conversations) -> None:
    without = Conversations()
    assert [turn(without, number) for number in range(3)] == [0, 0, 0]
    assert [turn(turns, number, prompt=(1,) * 100) for number in range(2)] == [0, 0]


def test_the_oldest_episodes_are_given_up(turns: Conversations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MOST", 2)
    for ordinal in range(3):
        turn(turns, 0, ordinal=ordinal)
    assert [turn(turns, 1, ordinal=ordinal) for ordinal in (0, 2)] == [0, 1]
