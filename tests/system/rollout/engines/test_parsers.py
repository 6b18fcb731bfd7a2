"""Answers through vLLM's own parsers."""

import asyncio
import json
from typing import Any

import openai
import pytest

from configs.schema import Config
from configs.validate import ConfigError
from rollout.chat.messages import Message, ToolSpec
from rollout.engines.vllm.parsers import VllmParser
from rollout.sessions.harness import Connection, HarnessTask
from scripts.plan.preview import check_parsers
from tests.support.chat_models import chat_tokenizer
from tests.support.compose import changed
from tests.support.harnesses import Policy, run_one

pytestmark = pytest.mark.slow

TOOL = ToolSpec(name="calculator", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
HERMES = '<tool_call>\n{"name": "calculator", "arguments": {"a": 1}}\n</tool_call>'
XML = "<tool_call>\n<function=calculator>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def parse(text: str, options: dict[str, Any] | None = None, **names: str) -> Message:
    parser = VllmParser(chat_tokenizer("qwen3"), **names)
    return parser.parse(text, "call_{}".format, tools=[TOOL], options=options)


@pytest.mark.parametrize(("tool_parser", "call"), [("hermes", HERMES), ("qwen3_xml", XML)])
def test_calls_and_reasoning_are_read_by_the_named_parsers(tool_parser: str, call: str) -> None:
    text = f"<think>\nHm.\n</think>\n\nI ask. {call}"
    message = parse(text, tool_parser=tool_parser, reasoning_parser="qwen3")
    assert (message.reasoning or "").strip() == "Hm." and message.content.strip() == "I ask."
    [called] = message.tool_calls
    assert (called.call_id, called.name, json.loads(called.arguments)) == ("call_0", "calculator", {"a": 1})


def test_the_template_options_say_whether_the_policy_reasons() -> None:
    names = {"reasoning_parser": "qwen3"}
    assert parse("It is 4.", {"enable_thinking": False}, **names).content == "It is 4."
    assert parse("Hm, cut", **names).reasoning == "Hm, cut"


def test_what_no_parser_is_named_for_is_read_as_without_vllm() -> None:
    text = f"<think>\nHm.\n</think>\n\nI ask. {HERMES}"
    with_tools, with_reasoning = parse(text, tool_parser="hermes"), parse(text, reasoning_parser="qwen3")
    assert with_tools.reasoning == (with_reasoning.reasoning or "").strip() == "Hm."
    assert [len(message.tool_calls) for message in (with_tools, with_reasoning)] == [1, 1]


def test_a_session_reads_answers_by_the_parser_of_its_key() -> None:
    class Asks:
        async def run(self, task: HarnessTask, connection: Connection) -> float:
            async with openai.AsyncOpenAI(base_url=f"{connection.url}/v1", api_key=connection.key) as client:
                message: Any = {"role": "user", "content": task.prompt}
                tool: Any = {"type": "function", "function": {"name": TOOL.name, "parameters": dict(TOOL.parameters)}}
                answer = await client.chat.completions.create(model="any", messages=[message], tools=[tool])
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.type == "function"
            return float(json.loads(call.function.arguments) == {"a": 1})

    episode = asyncio.run(run_one(Asks(), Policy(lambda text, request: XML), tool_parser="qwen3_xml"))
    assert episode.result is not None and (episode.result.error, episode.result.reward) == (None, 1.0)


def test_the_name_of_a_parser_is_checked_before_anything_starts() -> None:
    check_parsers(changed(Config(), sessions__tool_parser="hermes", sessions__reasoning_parser="qwen3"))
    with pytest.raises(ConfigError, match=r"^sessions\.reasoning_parser=qwen33: vLLM has no such parser; .* qwen3,"):
        check_parsers(changed(Config(), sessions__reasoning_parser="qwen33"))


@pytest.mark.parametrize("malformed", ['<tool_call>{"name": "calculator", "argu', "<tool_call>\n[1]\n</tool_call>"])
def test_a_malformed_call_stays_text(malformed: str) -> None:
    message = parse(malformed, tool_parser="hermes")
    assert (message.tool_calls, message.content) == ((), malformed)


def test_an_answer_that_a_parser_cannot_read_stays_text(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __init__(self, *_: Any):
            raise RuntimeError("unreadable")

    parser = VllmParser(chat_tokenizer("qwen3"), tool_parser="hermes")
    parser._tool_parser = Broken
    assert parser.parse(HERMES, "call_{}".format).content == HERMES and "unreadable" in caplog.text


def test_a_parser_that_vllm_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tool_parser='hermez' is not known to vLLM: use one of .*hermes"):
        VllmParser(chat_tokenizer("qwen3"), tool_parser="hermez")
