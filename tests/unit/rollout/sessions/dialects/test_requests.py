"""The meaning of requests in each dialect, and the errors of those that are refused."""

from typing import Any

import pytest
from hypothesis import given, settings

from rollout.chat.messages import Message, Role
from rollout.sessions.app import DIALECTS
from rollout.sessions.errors import BadRequestError
from tests.support.bodies import ANTHROPIC, CHANGES, CHAT, COMPLETIONS, MINIMAL, RESPONSES, USER


def request_of(dialect: Any, **fields: Any) -> Any:
    return dialect.parse(MINIMAL[dialect] | fields, 0).request


@pytest.mark.parametrize(
    ("dialect", "fields", "where", "allowed"),
    [
        (CHAT, {"max_token": 5}, "max_token", "max_tokens"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "an integer from 1"),
        (CHAT, {"max_tokens": True}, "max_tokens", "an integer from 1"),
        (CHAT, {"messages": []}, "messages", "at least one message"),
        (CHAT, {"messages": [{"role": "function"}]}, "messages[0].role", '"tool"'),
        (CHAT, {"messages": [USER | {"cotent": ""}]}, "messages[0].cotent", "content"),
        (CHAT, {"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id", "a string"),
        (CHAT, {"n": 129}, "n", "to 128"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", '{"type": "text"}'),
        (CHAT, {"logit_bias": {"5": 100}}, "logit_bias", "only null"),
        (CHAT, {"top_logprobs": 5}, "top_logprobs", "only null or 0"),
        (CHAT, {"temperature": "hot"}, "temperature", "a finite number"),
        (CHAT, {"stop": [""]}, "stop", "none of them empty"),
        (CHAT, {"tools": [{"type": "namespace"}]}, "tools[0].type", '"function"'),
        (CHAT, {"tools": [{"function": {"name": "f"}}]}, "tools[0].type", '"function"'),
        (CHAT, {"tool_choice": "f"}, "tool_choice", "auto, none, required"),
        (CHAT, {"stream_options": {"include_usages": True}}, "stream_options.include_usages", "include_usage"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt", "one text or one list of token ids"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt", "token ids"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "not empty"),
        (COMPLETIONS, {"echo": True}, "echo", "only null or false"),
        (COMPLETIONS, {"best_of": 4, "n": 2}, "best_of", "only null or 2"),
        (COMPLETIONS, {"logprobs": 5}, "logprobs", "from 0 to 1"),
        (RESPONSES, {"previous_response_id": "chatcmpl-g_0"}, "previous_response_id", "resp_"),
        (RESPONSES, {"background": True}, "background", "false"),
        (RESPONSES, {"conversation": "c"}, "conversation", "previous_response_id"),
        (RESPONSES, {"input": []}, "input", "not empty"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "that this session has given"),
        (RESPONSES, {"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type", '"message"'),
        (RESPONSES, {"tools": [{"type": "functions"}]}, "tools[0].type", '"function"'),
        (ANTHROPIC, {"max_tokens": None}, "max_tokens", "a positive integer"),
        (ANTHROPIC, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].type", '"custom"'),
        (ANTHROPIC, {"messages": [USER, {"role": "assistant", "content": "4"}]}, "messages", "the user's turn"),
        (ANTHROPIC, {"tool_choice": {"type": "tool"}}, "tool_choice.name", "a string"),
        (ANTHROPIC, {"n": 2}, "n", "only null or 1"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    dialect: Any, fields: dict[str, Any], where: str, allowed: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        request_of(dialect, **fields)
    assert refused.value.param == where
    assert refused.value.message.startswith(f"{where} = ") and allowed in refused.value.message


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, ANTHROPIC])
@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "input_audio", "file", "input_file", "document"])
def test_what_is_no_text_is_refused(dialect: Any, kind: str) -> None:
    name = "input" if dialect is RESPONSES else "messages"
    with pytest.raises(BadRequestError, match=rf'{name}\[0\].content\[0\].type = "{kind}": allowed is one of'):
        request_of(dialect, **{name: [{"role": "user", "content": [{"type": kind}]}]})


def test_a_value_that_is_long_is_shown_in_part() -> None:
    with pytest.raises(BadRequestError) as refused:
        request_of(CHAT, tool_choice="x" * 10_000)
    assert len(refused.value.message) < 300


def test_parts_of_text_are_joined_and_a_developer_is_a_system() -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?", "cache_control": {"type": "ephemeral"}}]
    expected = (Message(role=Role.system, content="Be short."), Message(role=Role.user, content="2 + 2?"))
    developer = {"role": "developer", "content": "Be short."}
    user = {"role": "user", "content": parts}
    assert request_of(CHAT, messages=[developer, user]).messages == expected
    billing = parts[0] | {"text": "x-anthropic-billing-header: cch=5f0c;"}  # another in every request
    system = [billing, parts[0] | {"text": "Be short."}]
    assert request_of(ANTHROPIC, system=system, messages=[user]).messages == expected
    assert request_of(RESPONSES, input=[developer, user | {"type": "message"}]).messages == expected
    assert request_of(RESPONSES, instructions="Be short.", input="2 + 2?").messages == expected


def test_sampling_that_is_asked_for_is_told_and_wishes_about_the_template_too() -> None:
    chat = request_of(
        CHAT, temperature=0, top_k=5, max_completion_tokens=7, chat_template_kwargs={"enable_thinking": False}
    )
    assert (chat.sampling, chat.max_tokens) == ({"temperature": 0, "top_k": 5}, 7)
    assert chat.template_options == {"enable_thinking": False}
    anthropic = request_of(ANTHROPIC, thinking={"type": "enabled", "budget_tokens": 1024}, top_p=0.5)
    assert (anthropic.sampling, anthropic.template_options) == ({"top_p": 0.5}, {"enable_thinking": True})
    responses = request_of(RESPONSES, reasoning={"effort": "low"}, store=False, include=["reasoning.encrypted_content"])
    assert responses.template_options == {"reasoning_effort": "low"}


def test_a_tool_result_that_is_an_error_is_told_by_its_text() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "no"}], "is_error": True}
    (message,) = request_of(ANTHROPIC, messages=[{"role": "user", "content": [result]}]).messages
    assert message == Message(role=Role.tool, content="no", call_id="c")


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@given(changes=CHANGES)
@settings(max_examples=80)
def test_whatever_a_body_holds_it_is_understood_or_refused_in_few_words(dialect: Any, changes: dict[str, Any]) -> None:
    try:
        dialect.parse(MINIMAL[dialect] | changes, 0)
    except BadRequestError as refused:
        assert len(refused.message) < 1000 and refused.param
