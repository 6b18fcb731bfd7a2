"""Every dialect gives back what it was told: an answer that a harness sends back is the message that it was."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.chat.messages import Answer, Finish, Message, Role, ToolCall
from rollout.sessions.dialects.dialect import ParsedRequest
from tests.support.bodies import ANTHROPIC, CHAT, MINIMAL, RESPONSES, USER
from tests.support.sessions import make_answer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SOME_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
ARGUMENTS = st.dictionaries(SOME_TEXT, st.one_of(TEXT, st.integers(-9, 9), st.booleans(), st.none()), max_size=3)
CALLS = st.lists(st.tuples(SOME_TEXT, ARGUMENTS), max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    calls = tuple(
        ToolCall(call_id=f"call_7_{index}", name=name, arguments=json.dumps(arguments))
        for index, (name, arguments) in enumerate(draw(CALLS))
    )
    content = draw(TEXT if calls else SOME_TEXT)
    finish = Finish.tool_calls if calls else draw(st.sampled_from([Finish.stop, Finish.length]))
    return make_answer(content, number=7, reasoning=draw(st.none() | SOME_TEXT), tool_calls=calls, finish=finish)


def data_of(events: Iterable[bytes]) -> list[dict[str, Any]]:
    lines = [line for event in events for line in event.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def canonical(message: Message) -> tuple[Any, ...]:
    calls = [(call.call_id, call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return message.role, message.content, message.reasoning, calls


def parsed(dialect: Any, **fields: Any) -> ParsedRequest:
    return dialect.parse(MINIMAL[dialect] | fields, 0)


def sent_back(dialect: Any, body: dict[str, Any]) -> Message:
    """The assistant's message of the next request, of a harness that sends the whole answer back."""
    if dialect is CHAT:
        history: dict[str, Any] = {"messages": [USER, body["choices"][0]["message"]]}
    elif dialect is RESPONSES:
        history = {"input": [USER, *body["output"]]}
    else:
        history = {"messages": [USER, {"role": "assistant", "content": body["content"]}, USER]}
    return parsed(dialect, **history).request.messages[1]


def from_events(dialect: Any, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a client puts together from a stream."""
    if dialect is RESPONSES:
        return events[-1]["response"]
    return _from_chunks(events) if dialect is CHAT else _from_blocks(events)


def _from_chunks(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for choice in (event["choices"][0] for event in events):
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["tool_calls"] += delta.get("tool_calls", [])
        message |= {name: delta[name] for name in ("reasoning", "reasoning_content") if name in delta}
    return {"choices": [{"message": message, "finish_reason": events[-1]["choices"][0]["finish_reason"]}]}


def _from_blocks(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
            case "content_block_delta":
                delta = {name: value for name, value in event["delta"].items() if name != "type"}
                blocks[-1] |= {"input": json.loads(delta["partial_json"])} if "partial_json" in delta else delta
    return {"content": blocks}


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, ANTHROPIC])
@given(answer=answers())
@settings(max_examples=50)
def test_an_answer_that_is_sent_back_is_the_same_message(dialect: Any, answer: Answer) -> None:
    body = json.loads(json.dumps(dialect.body(parsed(dialect), [answer])))
    message = sent_back(dialect, body)
    assert canonical(message) == canonical(answer.message)
    if dialect is not CHAT and answer.message.reasoning is not None:
        assert message.signature == answer.answer_id


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, ANTHROPIC])
@given(answer=answers())
@settings(max_examples=50)
def test_a_stream_says_what_the_whole_answer_says(dialect: Any, answer: Answer) -> None:
    events = data_of(dialect.events(parsed(dialect, stream=True), [answer]))
    assert canonical(sent_back(dialect, from_events(dialect, events))) == canonical(answer.message)


@given(answer=answers())
@settings(max_examples=50)
def test_the_deltas_of_responses_add_up_to_its_items(answer: Answer) -> None:
    """Clients may read either."""
    events = data_of(RESPONSES.events(parsed(RESPONSES, stream=True), [answer]))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = events[-1]["response"]["output"]
    for index, item in enumerate(items):
        deltas = [event["delta"] for event in events if event.get("output_index") == index and "delta" in event]
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == whole
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == items


def test_arguments_that_are_no_object_reach_an_anthropic_harness_as_text() -> None:
    for text in ("[1]", "{", '{"a": NaN}', "[" * 100_000, '{"a": "\\ud800"}', '{"a": 1e999}'):
        call = ToolCall(call_id="c", name="calculator", arguments=text)
        body = ANTHROPIC.body(parsed(ANTHROPIC), [make_answer("", finish=Finish.tool_calls, tool_calls=(call,))])
        assert body["content"][0]["input"] == {"arguments": text}


def test_a_stop_string_is_named_where_the_dialect_has_a_field_for_it() -> None:
    for stop_string, reason in ((None, "end_turn"), ("ur", "stop_sequence")):
        answer = replace(make_answer("fo"), stop_string=stop_string)
        body = ANTHROPIC.body(parsed(ANTHROPIC, stop_sequences=["ur"]), [answer])
        assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop_string)


def test_items_of_two_answers_are_two_messages() -> None:
    """The items have no message between them."""
    items: list[Any] = [
        {"type": "reasoning", "id": "rs_g_1", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "id": "msg_g_2", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "4"}]},
    ]
    call = ToolCall(call_id="c", name="f", arguments="{}")
    assert parsed(RESPONSES, input=items).request.messages == (
        Message(role=Role.assistant, reasoning="a", signature="g_1"),
        Message(role=Role.assistant, content="b", signature="g_2", tool_calls=(call,)),
        Message(role=Role.tool, content="4", call_id="c"),
    )
