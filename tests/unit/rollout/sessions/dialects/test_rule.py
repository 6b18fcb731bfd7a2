"""The rule for fields that sessions do not act on: each field in each dialect is applied, refused, or left out."""

import json
import logging
from typing import Any

import pytest

from rollout.chat.messages import Answer, Finish, Role, ToolCall
from rollout.sessions.app import DIALECTS
from rollout.sessions.dialects.anthropic import parse_count
from rollout.sessions.dialects.rule import LeftOutLog
from rollout.sessions.errors import BadRequestError
from tests.support.bodies import ANTHROPIC, CHAT, MINIMAL, RESPONSES, USER, tool_of
from tests.support.sessions import make_answer

TALKS = [CHAT, RESPONSES, ANTHROPIC]
each_talk = pytest.mark.parametrize("dialect", TALKS, ids=["chat", "responses", "anthropic"])
each_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


def parsed(dialect: Any, **fields: Any) -> Any:
    return dialect.parse(MINIMAL[dialect] | fields, 0)


def refusal(dialect: Any, **fields: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as refused:
        parsed(dialect, **fields)
    return refused.value


# -- fields x dialects -------------------------------------------------------------------------------------------------

SILENT: dict[str, Any] = {"metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "prompt_cache_key": "k"}
LEFT_OUT: dict[str, Any] = {
    "max_tool_calls": 3,
    "mcp_servers": [{"url": "https://x"}],
    "models": ["x", "y"],
    "min_answer_joy": 5,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "provider": {"order": ["x"]},
    "skip_special_tokens": False,
    "truncation": "auto",
    "usage": {"include": True},
    "verbosity": "low",
    "web_search_options": {},
}
REFUSED: dict[str, Any] = {
    "allowed_token_ids": [5],
    "background": True,
    "bad_words": ["no"],
    "chat_template": "{{ messages }}",
    "continue_final_message": True,
    "documents": [{"text": "x"}],
    "functions": [{"name": "f"}],
    "guided_json": {"type": "object"},
    "ignore_eos": True,
    "logit_bias": {"5": 1},
    "max_new_tokens": 5,
    "min_tokens": 5,
    "response_format": {"type": "json_object"},
    "stop_token_ids": [5],
    "structured_outputs": {"regex": "a"},
    "top_logprobs": 5,
    "truncate_prompt_tokens": 5,
}


@each_dialect
@pytest.mark.parametrize("name", SILENT)
def test_what_is_for_an_operator_is_not_counted(dialect: Any, name: str) -> None:
    assert parsed(dialect, **{name: SILENT[name]}).left_out == ()


@each_dialect
@pytest.mark.parametrize("name", LEFT_OUT)
def test_hints_and_unknown_extras_are_left_out_and_counted(dialect: Any, name: str) -> None:
    assert parsed(dialect, **{name: LEFT_OUT[name]}).left_out == (name,)
    assert parsed(dialect, **{name: None}).left_out == ()


@each_dialect
@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_what_the_policy_reads_or_may_say_is_refused_by_name(dialect: Any, name: str) -> None:
    error = refusal(dialect, **{name: REFUSED[name]})
    assert error.param == name and error.message.startswith(f"{name} = ")


@pytest.mark.parametrize(
    "name", ["max_tokens", "max_output_tokens", "n", "stop", "stop_sequences", "messages", "input"]
)
@each_dialect
def test_a_field_of_another_dialect_is_read_or_refused(dialect: Any, name: str) -> None:
    """It may not be left out, because it says what is read or how much may be said."""
    value = {"n": 2, "stop": ["x"], "stop_sequences": ["x"]}.get(name, [USER] if name in ("messages", "input") else 9)
    try:
        assert parsed(dialect, **{name: value}).left_out == ()
    except BadRequestError as error:
        assert error.param == name


NEUTRAL: dict[str, Any] = {
    "add_generation_prompt": True,
    "background": False,
    "ignore_eos": False,
    "logit_bias": {},
    "min_tokens": 0,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "top_logprobs": 0,
    "truncation": "disabled",
    "verbosity": "medium",
}


@each_dialect
@pytest.mark.parametrize("name", NEUTRAL)
def test_values_that_change_nothing_are_neither_refused_nor_counted(dialect: Any, name: str) -> None:
    assert parsed(dialect, **{name: NEUTRAL[name]}).left_out == ()


@each_talk
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"reasoning": {"effort": "low", "enabled": True}}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"chat_template_kwargs": {"x": 1}}, {"x": 1}),
    ],
)
def test_options_of_the_template_are_applied_under_every_name(dialect: Any, fields: Any, options: Any) -> None:
    request = parsed(dialect, **fields)
    assert request.request.template_options == options and request.left_out == ()


@each_dialect
def test_a_known_field_that_is_misspelled_is_refused(dialect: Any) -> None:
    assert refusal(dialect, temprature=0.5).param == "temprature"


@each_dialect
def test_sampling_is_told_in_every_dialect(dialect: Any) -> None:
    assert parsed(dialect, top_k=5, min_p=0.1, seed=3).request.sampling == {"top_k": 5, "min_p": 0.1, "seed": 3}


def test_a_schema_that_need_not_hold_is_a_hint() -> None:
    schema = {"name": "x", "schema": {}, "strict": False}
    assert parsed(CHAT, response_format={"type": "json_schema", "json_schema": schema}).left_out
    assert parsed(RESPONSES, text={"format": {"type": "json_schema", **schema}}).left_out
    strict = {"type": "json_schema", **schema, "strict": True}
    assert refusal(RESPONSES, text={"format": strict}).param == "text.format"
    assert refusal(ANTHROPIC, output_config={"format": {"type": "json_schema", "schema": {}}}).param is not None


def test_names_of_speakers_and_errors_of_tools_which_no_template_shows_are_counted() -> None:
    assert parsed(CHAT, messages=[USER | {"name": "Ann"}]).left_out == ("messages[].name",)
    named = after_call(CHAT, "ok")
    named["messages"][-1]["name"] = "look"
    assert parsed(CHAT, **named).left_out == (), "the call has this name"
    failed = after_call(ANTHROPIC, "no")
    failed["messages"][-1]["content"][0]["is_error"] = True
    assert parsed(ANTHROPIC, **failed).left_out == ("messages[].content[].is_error",)


def test_an_unknown_field_of_a_message_is_counted_and_a_misspelled_one_is_refused() -> None:
    assert parsed(CHAT, messages=[USER | {"weight": 1}]).left_out == ("messages[].weight",)
    assert refusal(CHAT, messages=[{"role": "user", "contents": "2 + 2?"}]).param == "messages[0].contents"


# -- the choice of a tool ----------------------------------------------------------------------------------------------

CHOICES: dict[Any, dict[str, Any]] = {
    CHAT: {"required": "required", "f": {"type": "function", "function": {"name": "f"}}},
    RESPONSES: {"required": "required", "f": {"type": "function", "name": "f"}},
    ANTHROPIC: {"required": {"type": "any"}, "f": {"type": "tool", "name": "f"}},
}


@each_talk
@pytest.mark.parametrize("choice", ["required", "f"])
def test_the_choice_of_a_tool_is_a_hint_about_a_tool_that_there_is(dialect: Any, choice: str) -> None:
    wish = {"tool_choice": CHOICES[dialect][choice]}
    request = parsed(dialect, tools=[tool_of(dialect, "f")], **wish)
    assert request.request.tool_choice == choice
    assert len(request.left_out) == 1 and request.left_out[0].startswith("tool_choice = ")
    assert refusal(dialect, **wish).param == "tool_choice", "no tools at all"
    if choice == "f":
        assert "can call g" in refusal(dialect, tools=[tool_of(dialect, "g")], **wish).message


def test_a_choice_among_allowed_tools_is_a_hint() -> None:
    tools = [tool_of(RESPONSES, "f"), tool_of(RESPONSES, "g")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    request = parsed(RESPONSES, tools=tools, tool_choice=choice)
    assert request.request.tool_choice == "required" and len(request.request.tools) == 2
    assert refusal(RESPONSES, tools=tools[:1], tool_choice=choice).param == "tool_choice.tools"


def test_the_choice_of_no_tool_needs_none() -> None:
    assert parsed(ANTHROPIC, tool_choice={"type": "none"}).request.tool_choice == "none"


# -- tools -------------------------------------------------------------------------------------------------------------

PROVIDER = {
    CHAT: ["web_search", "code_interpreter"],
    RESPONSES: ["web_search", "web_search_preview_2025_03_11", "image_generation", "code_interpreter", "file_search"]
    + ["computer_use_preview", "mcp", "tool_search", "local_shell"],
    ANTHROPIC: ["web_search_20250305", "code_execution_20250522", "computer_20250124", "tool_search_tool_bm25_20251119"]
    + ["mcp_toolset", "web_fetch_20250910"],
}


@each_talk
def test_tools_that_only_a_provider_runs_are_left_out(dialect: Any) -> None:
    for kind in PROVIDER[dialect]:
        tools = [{"type": kind, "name": "x", "anything": {"a": 1}}, tool_of(dialect, "f")]
        request = parsed(dialect, tools=tools)
        assert [tool.name for tool in request.request.tools] == ["f"]
        assert request.left_out == (f'tools[].type = "{kind}"',)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("bash_20250124", "bash"), ("text_editor_20250728", "str_replace_based_edit_tool"), ("memory_20250818", "memory")],
)
def test_tools_of_anthropic_that_the_harness_runs_are_offered_with_their_schema(kind: str, name: str) -> None:
    request = parsed(ANTHROPIC, tools=[{"type": kind, "name": name}])
    (tool,) = request.request.tools
    assert tool.name == name and "command" in tool.parameters["properties"] and request.left_out == ()


NAMESPACE = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files.",
    "tools": [
        {"type": "function", "name": "read", "description": "Reads.", "strict": False, "parameters": {}},
        {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}},
    ],
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR}


def calls(*named: tuple[str, str]) -> Answer:
    tool_calls = tuple(ToolCall(call_id=f"c{i}", name=name, arguments=text) for i, (name, text) in enumerate(named))
    return make_answer("", finish=Finish.tool_calls, tool_calls=tool_calls)


def test_a_namespace_is_functions_and_its_calls_come_back_as_the_harness_knows_them() -> None:
    request = parsed(RESPONSES, tools=[NAMESPACE, PATCH])
    read, patch, apply_patch = request.request.tools
    assert (read.name, patch.name, apply_patch.name) == ("mcp__files__read", "mcp__files__patch", "apply_patch")
    assert read.description == "(mcp__files: Files.)\nReads." and patch.description == "Patches."
    assert "start: /x/" in apply_patch.description and request.left_out == ('tools[].format.type = "grammar"',)
    answer = calls(
        (read.name, '{"a": 1}'), (patch.name, '{"input": "p\\n"}'), (apply_patch.name, '{"no": 1}'), ("x", "{}")
    )
    items = RESPONSES.body(request, [answer])["output"]
    assert [(item["type"], item.get("namespace"), item["name"]) for item in items] == [
        ("function_call", "mcp__files", "read"),
        ("custom_tool_call", "mcp__files", "patch"),
        ("custom_tool_call", None, "apply_patch"),
        ("function_call", None, "x"),
    ]
    assert (items[1]["input"], items[2]["input"]) == ("p\n", '{"no": 1}')
    results = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"} for item in items]
    history = parsed(RESPONSES, input=[USER, *items, *results], tools=[NAMESPACE, PATCH]).request.messages
    sent = [(call.name, json.loads(call.arguments)) for call in history[1].tool_calls]
    assert sent[:2] == [("mcp__files__read", {"a": 1}), ("mcp__files__patch", {"input": "p\n"})]
    assert sent[2:] == [("apply_patch", {"input": '{"no": 1}'}), ("x", {})]
    assert [(message.role, message.call_id) for message in history[2:]] == [(Role.tool, f"c{i}") for i in range(4)]


def test_tools_among_the_items_are_offered_too_and_the_last_of_a_name_holds() -> None:
    function = {"type": "function", "name": "look", "description": "Old.", "parameters": {}}
    space = {"type": "namespace", "name": "functions", "description": "All.", "tools": [PATCH]}
    item = {"type": "additional_tools", "id": "at_1", "role": "developer"}
    items = [item | {"tools": [space, function]}, item | {"tools": [function | {"description": "New."}]}]
    request = parsed(RESPONSES, input=[*items, USER], tools=[NAMESPACE])
    assert [tool.name for tool in request.request.tools[2:]] == ["apply_patch", "look"]
    assert request.request.tools[3].description == "New." and len(request.request.messages) == 1
    (call,) = RESPONSES.body(request, [calls(("apply_patch", '{"input": "x"}'))])["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", "x")
    assert refusal(RESPONSES, input=items).param == "input"


def test_a_custom_tool_of_chat_is_a_function_with_one_text() -> None:
    tool = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": GRAMMAR}}}
    tool["custom"]["format"]["grammar"] = {"syntax": "lark", "definition": "start: /x/"}
    request = parsed(CHAT, tools=[tool])
    message = CHAT.body(request, [calls(("patch", '{"input": "é"}'))])["choices"][0]["message"]
    assert message["tool_calls"] == [{"id": "c0", "type": "custom", "custom": {"name": "patch", "input": "é"}}]
    history = parsed(
        CHAT, messages=[USER, message, {"role": "tool", "tool_call_id": "c0", "content": "ok"}], tools=[tool]
    )
    assert json.loads(history.request.messages[1].tool_calls[0].arguments) == {"input": "é"}


def test_a_stream_tells_the_input_of_a_custom_tool() -> None:
    request = parsed(RESPONSES, tools=[PATCH], stream=True)
    events = [event.decode() for event in RESPONSES.events(request, [calls(("apply_patch", '{"input": "x"}'))])]
    data = [json.loads(event.split("data: ")[1]) for event in events]
    assert [each["delta"] for each in data if each["type"] == "response.custom_tool_call_input.delta"] == ["x"]
    (done,) = [each["item"] for each in data if each["type"] == "response.output_item.done"]
    assert (done["type"], done["input"]) == ("custom_tool_call", "x")


def test_two_tools_that_the_policy_could_not_tell_apart_are_refused() -> None:
    tools = [NAMESPACE, {"type": "function", "name": "mcp__files__read", "parameters": {}}]
    assert refusal(RESPONSES, tools=tools).param == "tools"


# -- what is no text ---------------------------------------------------------------------------------------------------

PICTURE: dict[Any, dict[str, Any]] = {
    CHAT: {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    RESPONSES: {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    ANTHROPIC: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
}


def after_call(dialect: Any, output: Any, *rest: Any) -> dict[str, Any]:
    """The fields of a request whose history has a tool's result."""
    if dialect is CHAT:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": output}]
        return {"messages": [USER, *turns, *rest]}
    if dialect is RESPONSES:
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        return {"input": [USER, call, {"type": "function_call_output", "call_id": "c", "output": output}, *rest]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": output}
    return {
        "messages": [
            USER,
            call,
            {"role": "user", "content": [result, *(part for turn in rest for part in turn["content"])]},
        ]
    }


@each_talk
def test_an_image_that_a_tool_brings_is_a_note_and_one_that_the_user_brings_is_refused(dialect: Any) -> None:
    text = {"type": "input_text" if dialect is RESPONSES else "text", "text": "see "}
    picture = PICTURE[dialect]
    request = parsed(dialect, **after_call(dialect, [text, picture]))
    kind = picture["type"]
    note = f"see [{kind}: not shown, because this model reads text only]"
    assert request.request.messages[-1].content == note and "AAAA" not in str(request.request)
    assert len(request.left_out) == 1 and request.left_out[0].endswith(f'type = "{kind}"')
    beside = parsed(dialect, **after_call(dialect, "ok", {"role": "user", "content": [picture]}))
    assert beside.request.messages[-1].role is Role.user and "not shown" in beside.request.messages[-1].content
    where = "input" if dialect is RESPONSES else "messages"
    error = refusal(dialect, **{where: [{"role": "user", "content": [picture]}]})
    assert error.param == f"{where}[0].content[0].type"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "tool_reference", "tool_name": "Edit"}, "[tool_reference, Edit: not shown"),
        ({"type": "document", "title": "T", "source": {"type": "base64", "data": "AAAA"}}, "[document, T: not shown"),
        ({"type": "document", "source": {"type": "text", "data": "All of it."}}, "[document]\nAll of it."),
        (
            {"type": "search_result", "source": "x.org", "title": "T", "content": [{"type": "text", "text": "Here."}]},
            "[search_result, T, x.org]\nHere.",
        ),
    ],
)
def test_what_can_be_read_of_a_tools_result_is_in_its_note(part: dict[str, Any], said: str) -> None:
    request = parsed(ANTHROPIC, **after_call(ANTHROPIC, [part]))
    assert request.request.messages[-1].content.startswith(said) and len(request.left_out) == 1


def test_a_history_that_another_model_has_written_is_read_without_what_nobody_can_read() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Four."},
    ]
    request = parsed(ANTHROPIC, messages=[USER, {"role": "assistant", "content": blocks}, USER])
    assert request.request.messages[1].content == "Four." and len(request.left_out) == 3
    items = [USER, {"type": "web_search_call", "id": "ws", "action": {}}, {"role": "assistant", "content": "Four."}]
    request = parsed(RESPONSES, input=[*items, USER])
    assert len(request.request.messages) == 3 and request.left_out == ('input[].type = "web_search_call"',)


# -- ids, counts and words of the log ----------------------------------------------------------------------------------


def test_a_reference_is_the_item_that_was_given() -> None:
    call = ToolCall(call_id="call_7_0_ab", name="f", arguments='{"a": 1}')
    said = Answer(
        answer_id="gen_7_ab",
        message=make_answer("Yes.", reasoning="Hm.", tool_calls=(call,)).message,
        finish=Finish.tool_calls,
        prompt_ids=(1,),
        completion=make_answer().completion,
    )
    body = RESPONSES.body(parsed(RESPONSES), [said])
    references = [{"type": "item_reference", "id": item["id"]} for item in body["output"]]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    recorded = {"gen_7_ab": said}.get
    request = RESPONSES.parse(MINIMAL[RESPONSES] | {"input": [USER, *references, result]}, 0, recorded).request
    whole = RESPONSES.parse(MINIMAL[RESPONSES] | {"input": [USER, *body["output"], result]}, 0).request
    assert request == whole and len(request.messages) == 3
    for item_id in ("fc_gen_7_ab_1", "msg_gen_8_ab", "msg_", "x"):
        with pytest.raises(BadRequestError, match=r"input\[0\].id"):
            RESPONSES.parse(MINIMAL[RESPONSES] | {"input": [{"type": "item_reference", "id": item_id}]}, 0, recorded)


def test_a_conversation_that_ends_with_the_assistant_can_be_counted_but_not_answered() -> None:
    body = MINIMAL[ANTHROPIC] | {"messages": [USER, {"role": "assistant", "content": "4"}], "max_tokens": 1}
    assert len(parse_count(body).messages) == 2
    assert refusal(ANTHROPIC, messages=body["messages"]).param == "messages"


def test_each_field_is_said_once_however_many_sessions_send_it(caplog: pytest.LogCaptureFixture) -> None:
    log = LeftOutLog()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.say(["verbosity", 'tools[].type = "web_search"'])
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "requests of harnesses have verbosity",
        'requests of harnesses have tools[].type = "web_search"',
    ]
