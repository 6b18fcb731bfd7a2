"""Messages and tools of data sets: every field is kept, or refused by its place and name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rollout.chat.messages import Message, Role
from rollout.data.chats import read_chat, read_tools
from rollout.data.conversations import as_conversation, load_conversations
from rollout.data.rows import Columns, as_row, load_rows
from rollout.data.sources import DataError

USER = {"role": "user", "content": "Weather?"}
CALL: dict[str, Any] = {"name": "weather", "arguments": {"city": "Paris", "unit": None}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL, {"function": CALL, "index": 1}]}
SAID = {"role": "assistant", "content": "Sun."}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Looks.", "parameters": {"type": "object"}}}


def chat(*messages: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return read_chat(list(messages), "rows.jsonl:3", "messages").messages


def test_calls_and_results_belong_together_without_ids() -> None:
    result = {"role": "tool", "content": "sun"}
    _, said, first, second = chat(USER, CALLS, result, {"role": "tool", "content": "22", "name": "other"})
    assert said["content"] == "" and said["tool_calls"] == [
        {"id": f"call0000{number}", "type": "function", "function": CALL} for number in (0, 1)
    ]
    assert first == {"role": "tool", "content": "sun", "tool_call_id": "call00000", "name": "weather"}
    assert second == {"role": "tool", "content": "22", "tool_call_id": "call00001", "name": "other"}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_read_under_each_of_its_names(name: str) -> None:
    (message,) = chat(SAID | {name: "Easy."})
    assert message == SAID | {"reasoning_content": "Easy."}
    conversation = as_conversation({"messages": [USER, SAID | {name: "Easy."}]}, "rows.jsonl:3")
    assert conversation.messages[1] == Message(role=Role.assistant, content="Sun.", reasoning="Easy.")


def test_parts_of_text_are_joined_and_empty_fields_are_absent() -> None:
    parts = [{"type": "text", "text": "a", "image_url": None}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": "Ann", "tool_calls": [], "id": "m1", "refusal": None}
    assert chat(message) == ({"role": "user", "content": "ab", "name": "Ann"},)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (USER | {"mood": "good"}, r"messages[0].mood = \"good\": allowed is one of these fields: role, content"),
        (USER | {"tool_calls": [CALL]}, "messages[0].tool_calls = .*: allowed is only in a message of the assistant"),
        (USER | {"reasoning": "hm"}, "messages[0].reasoning = .*: allowed is only in a message of the assistant"),
        (USER | {"tool_call_id": "c"}, "messages[0].tool_call_id = .*: allowed is only in a message of a tool"),
        (SAID | {"function_call": CALL}, "messages[0].function_call = .*: allowed is only null; calls belong into"),
        (SAID | {"reasoning": "a", "thinking": "b"}, "messages[0] = .*: allowed is only one of reasoning_content,"),
        (SAID | {"weight": 1, "train": False}, "messages[0] = .*: allowed is only one of weight, train, loss"),
        (SAID | {"tool_calls": [{"name": "f", "mood": 1}]}, "messages[0].tool_calls[0].mood = 1: allowed is one of"),
        (SAID | {"tool_calls": [{"function": {"name": ""}}]}, "messages[0].tool_calls[0].function.name = "),
        (SAID | {"tool_calls": [{"name": "f", "arguments": [1]}]}, "messages[0].tool_calls[0].function.arguments = "),
        (SAID | {"tool_calls": [{"type": "custom", "function": CALL}]}, "messages[0].tool_calls[0].type = .*custom"),
        (SAID | {"tool_calls": [CALL | {"id": 5}]}, "messages[0].tool_calls[0].id = 5: allowed is a string"),
        (SAID | {"weight": 2}, "messages[0].weight = 2: allowed is 0 or 1"),
        (USER | {"content": [{"text": "x"}]}, "messages[0].content[0] = "),
        (USER | {"content": [{"type": "text", "text": "x", "image_url": "y"}]}, "messages[0].content[0] = "),
        (USER | {"content": 4}, "messages[0].content = 4"),
        ({"role": "critic", "content": "x"}, 'messages[0].role = "critic": allowed is one of system, developer'),
        ({"role": "assistant"}, "messages[0].content = null"),
        (USER | {"content": [{"type": "image_url", "image_url": "x"}]}, "messages[0].content[0] = "),
        (SAID | {"tool_calls": [{"name": "f", "arguments": '{"a": "\\ud800"}'}]}, "column 'messages': is no Unicode"),
    ],
)
def test_a_field_that_is_not_read_is_refused(message: dict[str, Any], said: str) -> None:
    pattern = "^rows.jsonl:3: " + said.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(DataError, match=pattern):
        chat(message)
    with pytest.raises(DataError, match=pattern.replace("messages", "prompt", 1)):
        as_row({"prompt": [message, USER], "answer": "1"}, "rows.jsonl:3", Columns(prompt="prompt", answer="answer"))


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        [TOOL["function"]],
        [{"function": TOOL["function"], "type": None}],
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        [TOOL | {"function": {**TOOL["function"], "parameters": '{"type": "object"}'}}],
    ],
)
def test_tools_are_read_in_every_form(tools: Any) -> None:
    assert read_tools(tools, "x:1") == (TOOL,)
    assert read_tools(None, "x:1") == read_tools("", "x:1") == read_tools("[]", "x:1") == ()


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("weather", "column 'tools' must be a list of tools, is str"),
        ([{"name": "f", "description": "\ud800"}], "column 'tools': is no Unicode text"),
        (["weather"], r'tools\[0\] = "weather": allowed is an object with type, function'),
        ([{"type": "web_search"}], r'tools\[0\]\.type = "web_search": allowed is "function"'),
        ([{"type": "function"}], r"tools\[0\]\.function = null: allowed is an object with name and parameters"),
        ([TOOL | {"strict": True}], r"tools\[0\]\.strict = true"),
        ([{"name": "f", "parameters": "city"}], r"tools\[0\]\.function\.parameters = "),
    ],
)
def test_what_is_no_tool_is_refused(tools: Any, said: str) -> None:
    with pytest.raises(DataError, match=rf"^x:1: {said}"):
        read_tools(tools, "x:1")


# -- the forms of conversations ----------------------------------------------------------------------------------------

EXPECTED = [(Role.user, "Weather?"), (Role.assistant, "Sun.")]


@pytest.mark.parametrize(
    ("record", "learned"),
    [
        ({"messages": [USER, SAID]}, {1}),
        ({"messages": json.dumps([USER, SAID])}, {1}),
        ({"conversations": [{"from": "human", "value": "Weather?"}, {"from": "gpt", "value": "Sun."}]}, {1}),
        ({"conversations": [USER, SAID]}, {1}),
        ({"prompt": "Weather?", "completion": "Sun."}, {1}),
        ({"prompt": [USER], "completion": [SAID]}, {1}),
        ({"instruction": "Weather?", "input": "", "output": "Sun."}, {1}),
    ],
)
def test_every_form_is_one_conversation(record: dict[str, Any], learned: set[int]) -> None:
    conversation = as_conversation(record, "rows.jsonl:3")
    assert [(message.role, message.content) for message in conversation.messages] == EXPECTED
    assert conversation.learned == learned


def test_only_the_completion_of_a_prompt_is_learned() -> None:
    conversation = as_conversation({"prompt": [USER, SAID, USER], "completion": [SAID]}, "x:1")
    assert conversation.learned == {3}


def test_what_stands_beside_the_older_forms_is_read() -> None:
    alpaca = {"instruction": "And", "input": "Rome?", "output": "Rain.", "history": [["Weather?", "Sun."]]}
    conversation = as_conversation(alpaca | {"system": "Be brief."}, "x:1")
    assert [message.content for message in conversation.messages] == [
        "Be brief.",
        "Weather?",
        "Sun.",
        "And\nRome?",
        "Rain.",
    ]
    assert conversation.learned == {2, 4}
    sharegpt = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "sun"},
        {"from": "gpt", "value": "Sun.", "loss": False},
    ]
    conversation = as_conversation({"conversations": sharegpt, "tools": json.dumps([TOOL["function"]])}, "x:1")
    assert conversation.learned == {1} and conversation.tools[0].name == "weather"
    (call,) = conversation.messages[1].tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", CALL["arguments"]) and call.call_id
    assert conversation.messages[2].call_id == call.call_id


@pytest.mark.parametrize("name", ["weight", "train", "loss"])
def test_a_message_says_whether_it_is_learned_under_three_names(name: str) -> None:
    messages = [USER, SAID | {name: False}, USER, SAID | {name: 1, "id": "m3"}]
    assert as_conversation({"messages": messages}, "x:1").learned == {3}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "x"}, r"or 'prompt' and 'completion', or 'instruction' and 'output'\); the row has text"),
        ({"messages": "4"}, "column 'messages' must be a list of messages, is a text"),
        ({"messages": [USER]}, "no message of the assistant is to be learned"),
        ({"messages": [USER, SAID], "tools": [{"name": "f", "returns": {}}]}, "tool 'f': 'returns' is none of the fi"),
        ({"messages": [USER, SAID], "system": ["x"]}, "column 'system' must be a text"),
        ({"messages": [{"role": "system", "content": "x"}, SAID], "system": "x"}, "column 'system' must be a text"),
        ({"messages": [{"role": "developer", "content": "y"}, USER, SAID], "system": "x"}, "then no message is of"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, r"conversations\[0\].from = .*: allowed is one of"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, r"conversations\[0\].from = .alien.: allowed is one of"),
        ({"conversations": [{"from": "gpt", "value": "x", "content": "y"}]}, r"conversations\[0\].content = .*only"),
        ({"instruction": 5, "output": "y"}, "column 'instruction' must be a text, is int"),
        ({"instruction": "x", "input": 5, "output": "y"}, "column 'input' must be a text, is int"),
        ({"instruction": "x", "output": ["y"]}, "column 'output' must be a text, is list"),
        ({"instruction": "x", "output": "y", "history": 5}, "column 'history' must be a list of pairs"),
        ({"instruction": "x", "output": "y", "history": ["z"]}, "column 'history' must be a list of pairs"),
        ({"instruction": "x", "output": "y", "history": [["a", 5]]}, "column 'history' must be a list of pairs"),
    ],
)
def test_a_row_of_no_form_is_refused_by_what_is_wrong_with_it(record: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"^x:1: .*{said}"):
        as_conversation(record, "x:1")


# -- files that store columns ------------------------------------------------------------------------------------------


def tool_rows() -> list[dict[str, Any]]:
    """Return two conversations with other tools and other arguments."""
    rows: list[dict[str, Any]] = []
    for name, arguments in (("add", {"opts": {"a": 1}}), ("weather", {"opts": {"b": {"c": [{"d": 2}]}}})):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        parameters = {"type": "object", "properties": {name: {"anyOf": [{"enum": [name]}, {"type": "null"}]}}}
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
        tool = {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
        rows.append({"messages": [*messages, SAID], "tools": [tool], "prompt": messages, "answer": "1"})
    return rows


def test_no_row_has_what_only_another_has_in_a_file_of_columns(tmp_path: Path) -> None:
    """A call learned with the parameters of somebody else's tool, all null, would be a call that nobody wrote."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tool_rows()), tmp_path / "x.parquet")
    (tmp_path / "x.json").write_text(json.dumps(tool_rows()))
    from_columns, from_json = (load_conversations(str(tmp_path / name)) for name in ("x.parquet", "x.json"))
    assert [replace(row, place="") for row in from_columns] == [replace(row, place="") for row in from_json]
    assert json.loads(from_columns[0].messages[1].tool_calls[0].arguments) == {"opts": {"a": 1}}
    assert list(from_columns[0].tools[0].parameters["properties"]) == ["add"]
    columns = Columns(prompt="prompt", answer="answer")
    assert load_rows(str(tmp_path / "x.parquet"), columns) == load_rows(str(tmp_path / "x.json"), columns)


def test_a_null_that_json_says_is_learned(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"parent": None, "a": 1}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": messages}))
    (conversation,) = load_conversations(str(tmp_path / "x.jsonl"))
    assert conversation.messages[1].tool_calls[0].arguments == '{"parent": null, "a": 1}'


OWN = """
from datasets import Dataset

def columns(entries):
    return Dataset.from_list([{"question": "?", "answer": "1", "k": {name: 1}} for name in entries])

def dicts(entries):
    return list(columns(entries))
"""


def test_rows_of_a_loader_are_cleaned_if_they_are_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_set.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = Columns(prompt="question", answer="answer")
    assert [row.extra for row in load_rows("ab", names, "own_set:columns")] == [{"k": {"a": 1}}, {"k": {"b": 1}}]
    assert load_rows("ab", names, "own_set:dicts")[0].extra == {"k": {"a": 1, "b": None}}, "nobody knows where from"


# -- text that is no messages, and messages that are no text -----------------------------------------------------------

JSON_SAID = '[{"name": "Ann"}, {"name": "Bob"}]'


def test_json_that_somebody_says_is_text() -> None:
    conversation = as_conversation({"prompt": '[{"a": 1}]: which keys?', "completion": JSON_SAID}, "x:1")
    assert [message.content for message in conversation.messages] == ['[{"a": 1}]: which keys?', JSON_SAID]
    assert as_row({"question": JSON_SAID, "answer": "2"}, "x:1", Columns(prompt="question", answer="answer")).question


@pytest.mark.parametrize("text", [str([USER]), json.dumps([USER])[:-1], "[{'from': 'human', 'value': 'x'}]"])
def test_text_that_begins_as_messages_and_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="x:1: column 'prompt' must be a list of messages, is a text that is not JSON"):
        as_conversation({"prompt": text, "completion": "y"}, "x:1")
    with pytest.raises(DataError, match="x:1: column 'question' must be .*, is a text that is not JSON"):
        as_row({"question": text, "answer": "2"}, "x:1", Columns(prompt="question", answer="answer"))


@pytest.mark.parametrize("message", [USER, {"from": "human", "value": "Weather?"}])
def test_json_text_of_messages_is_messages_in_a_prompt_too(message: dict[str, str]) -> None:
    text = json.dumps([message])
    row = as_row({"question": text, "answer": "2"}, "x:1", Columns(prompt="question", answer="answer"))
    assert row.question == "Weather?"


def test_a_completion_may_begin_with_the_result_of_a_call_in_its_prompt() -> None:
    record = {"prompt": [USER, CALLS], "completion": [{"role": "tool", "content": "sun"}, CALLS, SAID]}
    _, asked, result, again, _ = as_conversation(record, "x:1").messages
    assert (result.call_id, result.name) == (asked.tool_calls[0].call_id, "weather")
    assert len({call.call_id for call in (*asked.tool_calls, *again.tool_calls)}) == 4


def test_a_result_without_an_id_belongs_to_its_call_also_where_ids_repeat() -> None:
    def call(name: str, **more: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {}}, **more}

    twice = {"role": "assistant", "content": "", "tool_calls": [call("f", id="x"), call("g", id="x")]}
    result = {"role": "tool", "content": "1", "tool_call_id": "x"}
    assert [message.get("name") for message in chat(USER, twice, result, result)[2:]] == ["f", "g"]
    mixed = {"role": "assistant", "content": "", "tool_calls": [call("f", id="call00001"), call("g")]}
    assert [one["id"] for one in chat(USER, mixed)[1]["tool_calls"]] == ["call00001", "call00002"]
