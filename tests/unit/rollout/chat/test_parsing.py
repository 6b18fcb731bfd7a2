"""Answers are read as reasoning, content and calls."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat.messages import Message
from rollout.chat.parsing import AnswerParser, leaves_reasoning_open

ARGUMENTS = '{ "b":1.50,\n"a" : "\\u00e9</tool_call>" }'
CALL = f'<tool_call>\n{{"name": "calculator", "arguments": {ARGUMENTS}}}\n</tool_call>'
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def parse(text: str, **options: Any) -> Message:
    return AnswerParser().parse(text, "call_{}".format, **options)


def calls(message: Message) -> list[tuple[str, str, str]]:
    return [(call.call_id, call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("It is 4.", None, "It is 4."),
        ("<think>\nEasy.\n</think>\n\nIt is 4.", "Easy.", "It is 4."),
        ("Easy.\n</think>\n\nIt is 4.", "Easy.", "It is 4."),
        ("<think>\n\n</think>\n\nIt is 4.", None, "It is 4."),
        ("<think>\nEasy, bu", "Easy, bu", ""),
        ("The tag <think> and </think>", None, "The tag <think> and </think>"),
        ("", None, ""),
    ],
)
def test_reasoning_comes_before_the_content(text: str, reasoning: str | None, content: str) -> None:
    message = parse(text)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_reasoning_may_begin_in_the_prompt() -> None:
    assert leaves_reasoning_open("<|Assistant|><think>\n") and not leaves_reasoning_open("<think>\n\n</think>\n\n")
    assert parse("Easy, bu", reasoning_open=True).reasoning == "Easy, bu"
    assert parse("Easy.</think>4", reasoning_open=True).content == "4"


def test_arguments_are_kept_letter_by_letter() -> None:
    message = parse(f"<think>\nHm {CALL}\n</think>\n\nI ask.\n{CALL}\n{CALL}")
    expected = [("call_0", "calculator", ARGUMENTS), ("call_1", "calculator", ARGUMENTS)]
    assert calls(message) == expected and message.content == "I ask."


def test_the_arguments_are_those_of_the_call_and_not_of_another_object_in_it() -> None:
    arguments = '{"arguments" : {"a":  1}}'
    call = f'<tool_call>{{"more": [{{"arguments": {{}}}}], "arguments": {arguments}, "name": "f"}}</tool_call>'
    assert calls(parse(call)) == [("call_0", "f", arguments)]


def test_arguments_may_be_json_in_a_string_and_the_last_end_tag_may_be_cut() -> None:
    inner = '{"a":  1}'
    assert calls(parse(f'<tool_call>{{"arguments": {json.dumps(inner)}, "name": "f"}} ')) == [("call_0", "f", inner)]


@pytest.mark.parametrize(
    ("call", "name", "arguments"),
    [
        (r'{"name": "f", "arguments": {"a": "\ud83d"}}', "f", r'{"a": "\ud83d"}'),
        (r'{"name": "f\ud83d", "arguments": {"a": 1}}', r"f\ud83d", '{"a": 1}'),
        (r'{"name": "f", "arguments": "{\"a\": \"\udc00\"}"}', "f", r'{"a": "\udc00"}'),
    ],
)
def test_a_half_of_a_surrogate_pair_is_written_as_the_escape_that_it_came_as(
    call: str, name: str, arguments: str
) -> None:
    assert calls(parse(f"<tool_call>{call}</tool_call>")) == [("call_0", name, arguments)]


@pytest.mark.parametrize(
    "malformed",
    [
        "<tool_call>",
        '<tool_call>{"name": "f", "arguments": {}',
        '<tool_call>{"name": "f", "arguments": {}} and</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "1"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 9999 + "</tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call>{1: 2}</tool_call>",
        "<tool_call>[1]</tool_call>",
    ],
)
def test_a_malformed_call_stays_text_and_costs_no_other_call(malformed: str) -> None:
    message = parse(f"{malformed}{CALL}")
    assert calls(message) == [("call_0", "calculator", ARGUMENTS)] and message.content == malformed
    assert parse(malformed).content == malformed


@given(
    text=st.lists(st.text(max_size=8) | st.sampled_from(["<think>", "</think>", "<tool_call>", CALL, '{"name": ', "{"]))
)
def test_any_text_is_an_answer(text: list[str]) -> None:
    parse("".join(text))


@given(
    arguments=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
)
def test_any_json_object_is_read_back(arguments: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    [(_, name, read)] = calls(parse(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'))
    assert (name, read) == ("f", written)
