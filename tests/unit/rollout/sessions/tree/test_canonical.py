"""Messages that count as the same, and the ids of answers and calls."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat.messages import ChatRequest, ToolCall, ToolSpec
from rollout.sessions.tree.canonical import answered_calls, canonical, canonical_arguments, head_digest, tools_digest
from rollout.sessions.tree.generation import Names
from tests.support.conversations import assistant, result, user

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(inner) for key, inner in reversed(value.items())}
    return [reversed_keys(inner) for inner in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_arguments_that_say_the_same_are_equal(arguments: dict[str, Any]) -> None:
    spaced = json.dumps(reversed_keys(arguments), indent=3, ensure_ascii=False)
    assert canonical_arguments(json.dumps(arguments)) == canonical_arguments(f"\n{spaced} ")


@given(JSON, JSON)
def test_arguments_that_differ_are_not_equal(left: Any, right: Any) -> None:
    def as_javascript(value: Any) -> str:
        return json.dumps(json.loads(json.dumps(value), parse_float=lambda text: _whole(float(text))), sort_keys=True)

    same = canonical_arguments(json.dumps(left)) == canonical_arguments(json.dumps(right))
    assert same == (as_javascript(left) == as_javascript(right))


def _whole(number: float) -> float:
    return int(number) if number.is_integer() else number


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_may_stand_where_arguments_should(text: str) -> None:
    assert canonical_arguments(text) == canonical_arguments(text + "\n")


@pytest.mark.parametrize(
    "text, same, other",
    [
        ('{"a": 2.0}', '{"a": 2}', '{"a": "2"}'),
        ("", "{}", "null"),
        ('{"a": 1', ' {"a": 1\n', '{"a": 1}'),
        ("[" * 100_000, "[" * 100_000 + " ", "["),
        ("9" * 5_000, "9" * 5_000, "9" * 5_001),
    ],
)
def test_odd_arguments(text: str, same: str, other: str) -> None:
    assert canonical_arguments(text) == canonical_arguments(same) != canonical_arguments(other)


def test_messages_are_the_same_whatever_an_sdk_adds_or_drops() -> None:
    call = ToolCall(call_id="call_0_0_ab", name="f", arguments='{"a":1}')
    ours = assistant("\n\n4 ", tool_calls=(call,), reasoning="hm", signature="gen_0_ab")
    theirs = assistant("4", tool_calls=(replace(call, call_id="toolu_7", arguments='{ "a": 1 }'),))
    assert canonical(ours) == canonical(theirs)
    for other in (
        replace(theirs, content="5"),
        replace(theirs, tool_calls=()),
        replace(theirs, tool_calls=(call, call)),
        replace(theirs, tool_calls=(replace(call, name="g"),)),
        replace(theirs, role=user("").role),
    ):
        assert canonical(ours) != canonical(other)
    assert canonical(user(" 4")) != canonical(user("4")), "what people and tools say is as it is"


def test_results_are_known_by_the_place_of_their_call() -> None:
    calls = assistant("", tool_calls=tuple(ToolCall(call_id=name, name="f", arguments="{}") for name in "xy"))
    again = assistant("", tool_calls=(ToolCall(call_id="x", name="f", arguments="{}"),))
    messages = [user("?"), calls, result("y", "1"), result("x", "2"), again, result("x", "3"), result("y", "4")]
    assert answered_calls(messages) == [-1, -1, 1, 0, -1, 0, -1]


def test_tools_and_template_options_are_part_of_the_beginning() -> None:
    def head(request: ChatRequest) -> str:
        return head_digest(request, tools_digest(request))

    plain = ChatRequest(messages=(), tools=(ToolSpec(name="f", parameters={"a": 1, "b": 2}),))
    assert head(plain) == head(replace(plain, tools=(ToolSpec(name="f", parameters={"b": 2, "a": 1}),), max_tokens=3))
    assert head(plain) != head(replace(plain, tools=()))
    assert head(plain) != head(replace(plain, template_options={"enable_thinking": False}))


@given(st.text(), st.text(), st.integers(0, 10**6), st.integers(0, 50))
def test_a_name_says_its_generation_within_its_session_only(session: str, other: str, number: int, at: int) -> None:
    names = Names(session)
    for name in (names.answer_id(number), names.call_id(number, at), f"chatcmpl-{names.answer_id(number)}"):
        assert names.number(name) == number
        assert other == session or Names(other).number(name) is None
    assert names.number(f"{names.answer_id(number)}0") is names.number("call_abc") is names.number("") is None
