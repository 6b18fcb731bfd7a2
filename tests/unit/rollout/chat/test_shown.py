"""Parts of messages that a template's text does not show."""

from typing import Any

import pytest

from rollout.chat.messages import Message, Role, ToolCall, ToolSpec
from rollout.chat.shown import hidden_context, hidden_parts

PARIS = ToolCall(call_id="0", name="weather", arguments='{"city": "Paris", "days": 2, "exact": true}')
ROME = ToolCall(call_id="1", name="weather", arguments='{"city": "Rome"}')
SHOWN = '{"name": "weather", "parameters": {"city": "Paris", "days": 2, "exact": true}}'


def said(content: str = "", **fields: Any) -> Message:
    return Message(role=Role.assistant, content=content, **fields)


@pytest.mark.parametrize(
    ("message", "text", "hidden"),
    [
        (said("4"), "4", []),
        (said(" 4\n"), "4", []),
        (said(""), "", []),
        (said("4", reasoning="Easy."), "<think>Easy.</think>4", []),
        (said("4", reasoning="Easy."), "4", ["reasoning"]),
        (said("4", reasoning=" \n"), "4", []),
        (said("Easy.", reasoning="Easy."), "Easy.", ["reasoning"]),  # one place is not enough for both
        (said("", tool_calls=(PARIS,)), SHOWN, []),
        (said("", tool_calls=(PARIS,)), "weather(city='Paris', days=2, exact=True)", []),
        (said("", tool_calls=(PARIS,)), '<invoke name="weather"></invoke>', ["calls"]),
        (said("Paris", tool_calls=(PARIS,)), SHOWN, ["content"]),
        (said("Let me see.", tool_calls=(PARIS,)), SHOWN, ["content"]),
        (said("", tool_calls=(PARIS, ROME)), SHOWN, ["calls"]),
        (said("", tool_calls=(PARIS, PARIS)), SHOWN, ["calls"]),
        (said("I close </think> here"), "<think>\nI close\n</think>\n\nhere", ["content"]),
        (said("<think>Easy.</think>4"), "<think>\nEasy.\n</think>\n\n4", []),
        (said("<think>Easy.</think>4"), "4", ["content"]),
    ],
)
def test_each_part_needs_a_place_of_its_own(message: Message, text: str, hidden: list[str]) -> None:
    assert hidden_parts(message, text) == hidden


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    call = ToolCall(call_id="0", name="weather", arguments="Paris, please")
    assert hidden_parts(said(tool_calls=(call,)), "weather(Paris, please)") == []
    assert hidden_parts(said(tool_calls=(call,)), "weather()") == ["calls"]


def test_the_context_is_shown_in_any_form() -> None:
    result = Message(role=Role.tool, content='{"degrees": 20, "note": "say \\"ü\\""}', call_id="0")
    messages = [Message(role=Role.user, content="Paris?\n"), said("hidden"), result]
    tools = [ToolSpec(name="weather")]
    for shown in (
        result.content,
        '"{\\"degrees\\": 20, \\"note\\": \\"say \\\\\\"ü\\\\\\"\\"}"',
        'degrees: 20\nnote: say "ü"',
    ):
        assert hidden_context(messages, tools, f"weather|Paris?|{shown}") == []
    assert hidden_context(messages, tools, "Paris?|degrees: 20") == [
        "the tool weather",
        "messages[2].content of the role tool",
    ]
    assert hidden_context(messages, tools, f"weather|{result.content}") == ["messages[0].content of the role user"]


def test_names_are_part_of_the_context() -> None:
    """Few templates show who speaks; the name of a result is that of its call."""
    messages = [
        Message(role=Role.user, content="Hi.", name="Ada"),
        Message(role=Role.tool, content="20", name="weather"),
    ]
    assert hidden_context(messages, (), "Ada: Hi. 20") == []
    assert hidden_context(messages, (), "user: Hi. 20") == ["messages[0].name"]
