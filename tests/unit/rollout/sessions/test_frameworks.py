"""Episodes of agent frameworks that nobody here wrote: over HTTP, and every sampled token is in one sequence."""

import asyncio
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from agents import ModelSettings, Runner
from openai import AsyncOpenAI

from rollout.agents.loop import Episode
from rollout.rewards.base import RewardResult
from rollout.sessions.harness import HarnessTask
from rollout.types import GenerationRequest
from tests.support.frameworks import (
    APIS,
    UNTRACED,
    openai_agents,
    openai_handoff,
    openai_solver,
    openai_sub_agents,
    pydantic_ai,
    pydantic_sub_agents,
)
from tests.support.harnesses import ClientHarness, Flaky, Policy, run_one

RIGHT = RewardResult(reward=1.0)

each_framework = pytest.mark.parametrize("framework", [openai_agents, pydantic_ai])
each_api = pytest.mark.parametrize("api", APIS)
whole_or_stream = pytest.mark.parametrize("is_stream", [False, True])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def solves(text: str, request: GenerationRequest) -> str:
    """Two calls side by side, one more, and the answer."""
    match text.count("<tool_response>\n"):
        case 0:
            products = [call("calculator", f'{{"expression": "{left} * 7"}}') for left in (4, 2)]
            return "<think>\nTwo products.\n</think>\n\n" + "\n".join(products)
        case 2:
            return "<think>\nTheir sum.\n</think>\n\n" + call("calculator", '{"expression":  "28 + 14"}')
        case _:
            assert all(f"<tool_response>\n{result}\n" in text for result in (28, 14, 42))
            return "<think>\nDone.\n</think>\n\nIt is 42."


def delegates(text: str, request: GenerationRequest) -> str:
    """Whoever has the calculator solves; whoever has not asks twice, and believes what it hears."""
    if '"name": "calculator"' in text.partition("<|im_end|>")[0]:
        return solves(text, request)
    if "<tool_response>\n" in text:
        return "I hear that it is 42."
    return "\n".join(call("ask", f'{{"input": "Task {number}"}}') for number in (1, 2))


def run(agent: Any, say: Any, transport: Flaky | None = None) -> tuple[Policy, Episode]:
    """An episode under weights that change with every answer."""
    version = count(1)

    def at_next_version(text: str, request: GenerationRequest) -> str:
        policy.version = next(version)
        return say(text, request)

    policy = Policy(at_next_version)
    episode = asyncio.run(run_one(ClientHarness(agent, transport), policy))
    assert trained(episode) == sorted(
        token
        for completion in policy.sampled.values()
        for token in zip(
            completion.token_ids,
            completion.logprobs,
            [completion.spans[0].global_steps] * completion.num_tokens,
            strict=True,
        )
    ), "every sampled token is trained once, with its logprob and version"
    return policy, episode


def trained(episode: Episode) -> list[tuple[int, float, int]]:
    parts = [
        (sequence.response_ids, sequence.rollout_logprobs, sequence.token_versions(), sequence.loss_mask)
        for sequence in episode.sequences
    ]
    return sorted(
        token
        for ids, logprobs, versions, mask in parts
        for token in zip(ids[mask], logprobs[mask], versions[mask], strict=True)
    )


@each_framework
@each_api
@whole_or_stream
def test_a_linear_agent_is_one_sequence(framework: Any, api: str, is_stream: bool) -> None:
    policy, episode = run(framework(api, is_stream), solves)
    assert episode.result == RIGHT and len(policy.sampled) == 3
    (sequence,) = episode.sequences
    assert np.array_equal(sequence.token_ids[: len(policy.prompts[2])], policy.prompts[2])
    forks = {name: value for name, value in episode.metrics.items() if name.startswith("forks") and value}
    assert (episode.metrics["merged_fraction"], episode.metrics["delivered_fraction"], forks) == (1, 1, {})


@pytest.mark.parametrize(("max_turn_tokens", "is_ours"), [(3, True), (99, False)])
def test_a_framework_that_raises_at_a_cut_answer_has_reached_a_limit_if_the_limit_is_ours(
    max_turn_tokens: int, is_ours: bool
) -> None:
    async def agent(task: HarnessTask, client: AsyncOpenAI) -> None:
        settings = ModelSettings(max_tokens=5)
        solver = replace(openai_solver("responses", client), model_settings=settings)
        await Runner.run(solver, task.prompt, run_config=UNTRACED)

    policy = Policy(lambda text, request: "Six times seven is forty-two.")
    episode = asyncio.run(run_one(ClientHarness(agent), policy, max_turn_tokens=max_turn_tokens))
    assert episode.finish_reason == ("length" if is_ours else "stop")
    assert (episode.result is None) == is_ours, "None: rollout.reward scores it"
    assert is_ours or "response.incomplete" in (episode.result and episode.result.error or "")


@each_api
def test_an_agent_that_takes_over_reads_its_own_instructions_and_tools(api: str) -> None:
    def say(text: str, request: GenerationRequest) -> str:
        if request.request_id.turn == 0:
            return "<think>\nNot mine.\n</think>\n\n" + call("transfer_to_solver", "{}")
        return solves(text.replace("<tool_response>\n{", ""), request)  # the framework answers the handoff, too

    policy, episode = run(openai_handoff(api, is_stream=True), say)
    assert episode.result == RIGHT
    first, second = episode.sequences
    head = policy.tokenizer.decode(second.prompt_ids).partition("<|im_end|>")[0]
    assert "Use the calculator." in head and '"name": "calculator"' in head and "transfer_to_solver" not in head
    assert first.loss_mask.sum() == policy.sampled[0].num_tokens, "the handoff itself"
    assert episode.metrics["forks_tools"] == 1 and episode.metrics["merged_fraction"] == 2 / 3


@pytest.mark.parametrize("framework", [openai_sub_agents, pydantic_sub_agents])
@each_api
def test_sub_agents_are_sequences_of_their_own_and_their_parent_goes_on(framework: Any, api: str) -> None:
    policy, episode = run(framework(api, is_stream=False), delegates)
    assert episode.result == RIGHT and len(policy.sampled) == 2 + 2 * 3
    parent, *children = (policy.tokenizer.decode(sequence.token_ids) for sequence in episode.sequences)
    assert "Delegate." in parent and "I hear" in parent and parent.count("<tool_response>\nIt is 42.") == 2
    assert sorted("Task 1" in child for child in children) == [False, True]
    assert all("Delegate." not in child and child.endswith("It is 42.<|im_end|>") for child in children)
    assert episode.metrics["merged_fraction"] == 1


@each_framework
@whole_or_stream
def test_a_lost_connection_costs_no_token_and_no_sequence(framework: Any, is_stream: bool) -> None:
    policy, episode = run(framework("chat", is_stream), solves, Flaky())
    assert episode.result == RIGHT and len(policy.sampled) == 3
    assert len(episode.sequences) == 1 and episode.metrics["repeated_requests"] == 1
