"""Episodes of the environments in rollout/environments, with a policy that says its lines."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from configs.rollout import RolloutConfig, ToolPlace
from rollout.agents.encoding import encode
from rollout.agents.loop import Episode
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.tool_processes import make_processes, tools_in
from rollout.prompts import Row
from rollout.types import Prompt
from tests.support.chat_models import chat_tokenizer
from tests.support.episodes import make_task
from tests.support.harnesses import Policy
from tests.support.sequences import only

TOKENIZER = chat_tokenizer("qwen2.5")


def prompt_of(
    loop: MultiTurn,
    ordinal: int = 0,
    chat: bool = True,
    question: str = "Begin.",
    ground_truth: str = "42",
    **extra: Any,
) -> Prompt:
    """Make a prompt as an agent worker does. `extra`: other columns of the row."""
    row = Row(question=question, ground_truth=ground_truth, extra=extra)
    (prompt,) = encode(TOKENIZER, [row], "{question}", chat, 9999, loop.prompt_tools)
    return replace(prompt, ordinal=ordinal)


async def episode_of(
    loop: MultiTurn, say: Sequence[str] | Callable[[str], str], prompt: Prompt | None = None, max_tokens: int = 9999
) -> Episode:
    """`say`: the lines of the policy, or what it answers to the text that it reads last."""
    prompt = prompt_of(loop) if prompt is None else prompt
    read = 0

    def line(text: str, request: Any) -> str:
        nonlocal read
        heard, read = text[read:], len(text)
        return say(heard) if callable(say) else say[request.request_id.turn]

    return await loop.run_episode(make_task(0, prompt, max_tokens=max_tokens), Policy(line).generate)


def play(loop: MultiTurn, say: Sequence[str] | Callable[[str], str], **more: Any) -> Episode:
    return asyncio.run(episode_of(loop, say, **more))


def play_row(
    loop: MultiTurn,
    say: Sequence[str] | Callable[[str], str],
    *,
    question: str = "Guess.",
    ground_truth: str = "",
    max_tokens: int = 500,
    **row: Any,
) -> Episode:
    """Play an episode of a row. The chat template is applied if the loop has a chat."""
    has_chat = loop.chat is not None
    prompt = prompt_of(loop, chat=has_chat, question=question, ground_truth=ground_truth, **row)
    return play(loop, say, prompt=prompt, max_tokens=max_tokens)


def played_in_both_places(episode: Callable[[], Episode], events: list[str]) -> Episode:
    """Play an episode in threads and in a process of its own, where it is the same, and return it. `events`: what the
    environment has noted, which are those of the process of the test."""
    in_threads = episode()
    events.clear()
    with tools_in(make_processes(RolloutConfig(tools_run_in=ToolPlace.process))):
        in_process = episode()
    assert heard(in_process) == heard(in_threads)
    assert (in_process.result, in_process.metrics) == (in_threads.result, in_threads.metrics)
    return in_threads


def told(episode: Episode) -> str:
    """Return what the policy did not sample of its only response."""
    sequence = only(episode)
    return TOKENIZER.decode(sequence.response_ids[~sequence.loss_mask])


def error_of(episode: Episode) -> str:
    """Return why there is no reward. Raises AssertionError where there is one."""
    assert episode.result is not None and episode.result.error is not None
    return episode.result.error


def heard(episode: Episode) -> str:
    """Return the response, with what the environment said."""
    return TOKENIZER.decode(only(episode).response_ids.tolist())


def call(name: str, /, **arguments: Any) -> str:
    """Write a turn that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
