"""Answers through vLLM's own parsers."""

import json
from typing import Any

import pytest

from rollout.engines.vllm.parsers import VllmParser
from rollout.sessions.messages import Message, ToolSpec
from tests.support.chat_models import chat_tokenizer

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
