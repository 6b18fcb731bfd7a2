"""Agent loops by name, and what a later attempt asks of its replica."""

from dataclasses import replace
from typing import Any

import pytest

from rollout.agents.loop import SingleTurn, load_agent_loop, resume_from
from rollout.agents.multi_turn import MultiTurn
from rollout.progress import PartialCompletion, prompt_checksum
from rollout.types import Completion, GenerationRequest
from tests.support.characters import Characters
from tests.support.fakes import make_completion, make_request

FEW_DOCUMENTS: Any = {"kind": "world", "documents": 8}


def test_an_agent_loop_by_name() -> None:
    assert type(load_agent_loop("single_turn", None)) is SingleTurn
    with pytest.raises(ValueError, match="rollout.agent_loop=multi: must be one of single_turn, or package.module"):
        load_agent_loop("multi", None)
    with pytest.raises(ValueError, match=r"rollout.agent_loop=os.path:basename: gave 'x', which has no run"):
        load_agent_loop("os.path:basename", "x")
    loop = load_agent_loop(
        "rollout.environments.search.tags:agent_loop", Characters(), {"retriever": FEW_DOCUMENTS, "max_turns": 7}
    )
    assert isinstance(loop, MultiTurn) and loop.max_turns == 7, "arguments by name"


async def test_what_is_complete_is_answered_at_once_and_the_rest_goes_on() -> None:
    calls: list[list[GenerationRequest]] = []

    async def generate(requests: list[GenerationRequest]) -> list[Completion]:
        calls.append(requests)
        return [make_completion([1], [4], "stop") for _ in requests]

    checksum = prompt_checksum((1, 2))
    done, begun = make_completion([5], [3], "length"), make_completion([6], [3], "")
    partials = {
        (0, 0): PartialCompletion(prompt_checksum=checksum, completion=done),
        (1, 0): PartialCompletion(prompt_checksum=checksum, completion=begun),
        (3, 0): PartialCompletion(prompt_checksum=checksum + 1, completion=done),  # of another prompt
    }
    requests = [make_request(f"9.4-{index}", 8) for index in range(4)]
    resumed = resume_from(partials, generate)
    answers = await resumed(requests)
    assert [answer.token_ids.tolist() for answer in answers] == [[5], [1], [1], [1]]
    assert calls == [[replace(requests[1], partial=begun), requests[2], requests[3]]]
    assert await resumed(requests[:1]) == [done] and len(calls) == 1, "the replica is not asked for nothing"


async def test_what_was_sampled_once_goes_on_in_one_request_only() -> None:
    """Three answers were asked to one prompt, and the third had not begun; a fourth is asked later."""
    calls: list[list[Completion | None]] = []

    async def generate(requests: list[GenerationRequest]) -> list[Completion]:
        calls.append([request.partial for request in requests])
        return [make_completion([1], [4], "stop") for _ in requests]

    checksum = prompt_checksum((1, 2))
    done, begun = make_completion([5], [3], "stop"), make_completion([6], [3], "")
    partials = {
        (0, turn): PartialCompletion(prompt_checksum=checksum, completion=completion)
        for turn, completion in enumerate((done, begun))
    }
    turns = [
        replace(make_request("9.4-0", 8), request_id=replace(make_request("9.4-0", 8).request_id, turn=turn))
        for turn in (2, 1, 0, 3)
    ]
    resumed = resume_from(partials, generate)
    answers = await resumed(turns[:3])
    assert [answer.token_ids.tolist() for answer in answers] == [[1], [1], [5]] and calls == [[None, begun]]
    await resumed(turns[3:])
    assert calls[1:] == [[None]], "not what another request has"
