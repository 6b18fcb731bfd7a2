"""Episodes of `MultiTurn` over a real chat template: their tokens are those of the whole conversation."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from rollout.agents.chat_turns import ChatTurns
from rollout.agents.encoding import encode
from rollout.agents.environment import Observation, Step, Turn
from rollout.agents.loop import Episode
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.tools import Toolbox, ToolEnvironment
from rollout.chat.messages import Message, Role
from rollout.chat.template import tool_dict
from rollout.prompts import Row
from rollout.types import GenerationRequest, Prompt
from tests.support.chat_models import chat_tokenizer
from tests.support.episodes import error_of, make_task
from tests.support.harnesses import Policy
from tests.support.sequences import only

CALLS = [("add", {"left": 2, "right": 3}), ("add", {"left": 1})]


def add(left: int, right: int = 1) -> int:
    """Add two numbers."""
    return left + right


TOOLBOX = Toolbox([add])


class Greets(ToolEnvironment):
    """An environment that says something before the first turn."""

    def __init__(self, first: Observation):
        super().__init__(TOOLBOX)
        self._first = first

    def reset(self) -> Observation:
        return self._first


def said(calls: list[tuple[str, Any]]) -> str:
    return "I add." + "".join(
        f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def loop_of(tokenizer: Any, first: Observation = "") -> MultiTurn:
    chat = ChatTurns(tokenizer, TOOLBOX.specs())
    return MultiTurn(lambda prompt: Greets(first), tokenizer, max_turns=4, chat=chat)


def prompt_of(loop: MultiTurn, tokenizer: Any) -> Prompt:
    """Make a prompt as an agent worker does."""
    (prompt,) = encode(tokenizer, [Row(question="Add!", ground_truth="")], "{question}", True, 999, loop.prompt_tools)
    return prompt


def play(loop: MultiTurn, prompt: Prompt, lines: list[str], policy: Policy | None = None) -> Episode:
    rest: Iterator[str] = iter(lines)
    policy = policy or Policy(lambda text, request: next(rest))
    return asyncio.run(loop.run_episode(make_task(0, prompt, max_tokens=999), policy.generate))


@pytest.mark.parametrize("first", [[], ["Two and three, and one."], ["Two and three.", "And one."]])
def test_an_episode_with_tools_has_the_tokens_of_the_whole_conversation(first: list[str]) -> None:
    tokenizer = chat_tokenizer("qwen2.5")
    loop = loop_of(tokenizer, [Message(role=Role.user, content=text) for text in first])
    episode = play(loop, prompt_of(loop, tokenizer), [said(CALLS), "It is 5, and 2."])
    assert episode.result is None and episode.metrics["tool_calls"] == 2
    conversation: list[dict[str, Any]] = [
        *({"role": "user", "content": text} for text in ("Add!", *first)),
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in CALLS],
        },
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 5, and 2."},
    ]
    tools = [tool_dict(tool) for tool in TOOLBOX.specs()]
    text = tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    sequence = only(episode)
    assert [*sequence.token_ids, *tokenizer.encode("\n")] == whole, "the template writes a line end after the last turn"
    sampled = tokenizer.decode(sequence.response_ids[sequence.loss_mask])
    assert sampled == said(CALLS) + "<|im_end|>It is 5, and 2.<|im_end|>"


def test_first_messages_need_a_prompt_of_the_chat_template() -> None:
    tokenizer = chat_tokenizer("qwen2.5")
    loop = loop_of(tokenizer, [Message(role=Role.user, content="Hi.")])
    plain = Prompt(ordinal=0, text="Add!", token_ids=tuple(tokenizer.encode("Add!")), ground_truth="")
    episode = play(loop, plain, [])
    assert "set data.chat_template=true" in error_of(episode)


def test_a_prompt_without_a_chat_template_cannot_show_tools() -> None:
    with pytest.raises(ValueError, match=r"data\.chat_template=false: the agent loop has tools"):
        encode(chat_tokenizer("qwen2.5"), [Row(question="?", ground_truth="")], "{question}", False, 9, TOOLBOX.specs())


def test_a_turn_ends_with_the_token_that_the_template_writes() -> None:
    """The end of the sequence is another token in Llama's tokenizer."""
    tokenizer = chat_tokenizer("llama3")
    requests: list[GenerationRequest] = []

    def say(text: str, request: GenerationRequest) -> str:
        requests.append(request)
        return "Hello."

    class Ends:
        def step(self, turn: Turn) -> Step:
            return Step(done=True)

    loop = MultiTurn(lambda prompt: Ends(), tokenizer, max_turns=1, chat=ChatTurns(tokenizer))
    policy = Policy(say)
    play(loop, prompt_of(loop, tokenizer), [], policy)
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") in requests[0].sampling.stop_token_ids


def test_reasoning_that_the_prompt_began_is_read_as_such() -> None:
    tokenizer = chat_tokenizer("deepseek")
    turn = ChatTurns(tokenizer).parse(tokenizer.encode("Easy.</think>\nFour."))
    assert (turn.reasoning, turn.content) == ("Easy.", "Four.")
