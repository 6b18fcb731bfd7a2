"""Turns that are computed again: those that this replica had in its KV cache, under the same weights."""

import pytest

from rollout.replica import conversations
from rollout.replica.conversations import Conversations
from rollout.request_ids import RequestId
from rollout.types import GenerationRequest, SamplingParams
from tests.support.fakes import make_completion


def turn(turns: Conversations, turn: int, cached: int = 0, version: int = 5, ordinal: int = 7) -> int:
    """Take in a turn with a prompt of 100 tokens, of which a tool said 20. Returns how many were computed again."""
    request = GenerationRequest(
        request_id=RequestId(ordinal=ordinal, turn=turn),
        prompt_ids=(1,) * 100,
        sampling=SamplingParams(),
        num_observed=20,
    )
    completion = make_completion([2] * 4, [version] * 4, "stop", cached)
    turns.add(request, completion)
    return turns.computed_again


def test_a_turn_of_which_the_cache_lost_most_is_computed_again() -> None:
    turns = Conversations()
    assert [turn(turns, 0), turn(turns, 1, cached=40), turn(turns, 2, cached=39), turn(turns, 3)] == [0, 0, 1, 2]
    assert turns.turns == 4


def test_turns_after_an_update_or_a_move_were_never_in_the_cache_for_these_weights() -> None:
    turns = Conversations()
    assert turn(turns, 3) == 0, "the turns before were elsewhere"
    assert turn(turns, 4, version=6) == 0, "no prefix is shared with other weights"
    assert turn(turns, 5, version=6) == 1


def test_the_oldest_episodes_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MOST", 2)
    turns = Conversations()
    for ordinal in range(3):
        turn(turns, 0, ordinal=ordinal)
    assert [turn(turns, 1, ordinal=ordinal) for ordinal in (0, 2)] == [0, 1]
