"""Requests with more than sessions act on, over HTTP: what is left out is counted, and ids lead back to answers."""

import asyncio
import logging
from typing import Any

import httpx
import openai
import pytest

from rollout.agents.loop import Episode
from rollout.sessions.harness import Connection, HarnessTask
from rollout.types import GenerationRequest
from tests.support.episodes import error_of
from tests.support.harnesses import ClientHarness, Policy, run_one

USER: Any = {"role": "user", "content": "2 + 2?"}
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SEARCH: Any = {"type": "web_search"}


def looks_then_answers(text: str, request: GenerationRequest) -> str:
    if "<tool_response>\n" in text:
        return "It is 4."
    return '<think>\nLook.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


def run(agent: Any) -> tuple[Policy, Episode]:
    policy = Policy(looks_then_answers)
    return policy, asyncio.run(run_one(ClientHarness(agent), policy))


def test_fields_that_are_left_out_are_counted_once_a_session_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(task: HarnessTask, client: openai.AsyncOpenAI) -> float:
        for _ in range(2):
            extra = {"nobody_knows": 1}
            await client.responses.create(model="m", input=[USER], tools=[LOOK, SEARCH], extra_body=extra)
        return 1.0

    with caplog.at_level(logging.WARNING):
        _, episode = run(agent)
    assert episode.metrics["ignored_fields"] == 2
    said = [record.message for record in caplog.records if "is left out" in record.message]
    assert len(said) == 2 and "nobody_knows" in said[1] and 'tools[].type = "web_search"' in said[0]


def test_an_agent_that_sends_all_that_is_known_has_nothing_ignored() -> None:
    async def agent(task: HarnessTask, client: openai.AsyncOpenAI) -> float:
        await client.chat.completions.create(model="m", messages=[USER], temperature=0.5, user="u", store=True)
        return 1.0

    assert run(agent)[1].metrics["ignored_fields"] == 0


def test_references_to_items_go_on_from_the_answer_that_they_name() -> None:
    """As Vercel's AI SDK does, with its defaults."""

    async def agent(task: HarnessTask, client: openai.AsyncOpenAI) -> float:
        first = await client.responses.create(model="m", input=[USER], tools=[LOOK])
        references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
        result: Any = {"type": "function_call_output", "call_id": f"{first.output[-1].call_id}", "output": "4"}  # pyright: ignore
        history: Any = [USER, *references, result]
        assert (await client.responses.input_tokens.count(model="m", input=history, tools=[LOOK])).input_tokens > 9
        second = await client.responses.create(model="m", input=history, tools=[LOOK])
        again = await client.responses.retrieve(second.id)
        assert (again.output_text, again.id, again.model, again.status) == ("It is 4.", second.id, "m", "completed")
        assert again.tools == second.tools and again.created_at == second.created_at
        return 1.0

    policy, episode = run(agent)
    assert error_of(episode) == ""
    (sequence,) = episode.sequences
    assert list(policy.prompts[1]) == sequence.token_ids[: len(policy.prompts[1])].tolist()
    assert int(sequence.loss_mask.sum()) == sum(each.num_tokens for each in policy.sampled.values())


def test_a_response_that_was_not_stored_cannot_be_had_again() -> None:
    async def agent(task: HarnessTask, client: openai.AsyncOpenAI) -> float:
        first = await client.responses.create(model="m", input=[USER], store=False)
        for name in (first.id, "resp_gen_9_x", "x"):
            with pytest.raises(openai.NotFoundError, match="response_not_found"):
                await client.responses.retrieve(name)
        return 1.0

    assert run(agent)[1].result is not None


def test_a_client_that_looks_for_the_server_and_for_a_model_finds_them() -> None:
    class Looking:
        async def run(self, task: HarnessTask, connection: Connection) -> float:
            async with httpx.AsyncClient(trust_env=False) as client:
                for place in (connection.url, f"{connection.url}/", connection.server_url):
                    assert (await client.head(place)).status_code == 200, "without a key"
                assert (await client.get(connection.url)).status_code == 401
                url, headers = f"{connection.url}/v1/models", {"x-api-key": connection.key}
                assert (await client.get(f"{url}/meta/llama", headers=headers)).json()["id"] == "meta/llama"
                assert (await client.get(f"{url}/x")).status_code == 401
                body = {"model": "m", "max_tokens": 9, "messages": [USER]}
                await client.post(f"{connection.url}/v1/messages", headers=headers, json=body)
            return 1.0

    episode = asyncio.run(run_one(Looking(), Policy(looks_then_answers)))
    assert error_of(episode) == ""
