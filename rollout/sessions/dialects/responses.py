"""OpenAI Responses, which has items instead of messages, and conversations that may be kept on the server."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.chat.messages import Answer, ChatRequest, Message, Role, ToolCall
from rollout.http.answers import openai_error
from rollout.sessions.dialects.dialect import (
    CUT_SHORT,
    SAMPLING,
    Dialect,
    ParsedRequest,
    Recorded,
    event,
    id_without,
    num_sampled_tokens,
    template_options,
    text_format,
)
from rollout.sessions.dialects.fields import PARSED_ARGUMENTS, Fields, joined_text
from rollout.sessions.dialects.openai import ROLES
from rollout.sessions.dialects.tools import (
    WORDS,
    OfferedTool,
    Offers,
    custom_arguments,
    custom_input,
    flat_name,
    openai_choice,
    response_tools,
    with_names_apart,
)
from rollout.sessions.errors import SessionError

MESSAGE, REASONING, CALL, CUSTOM_CALL = "msg_", "rs_", "fc_", "ctc_"
"""The beginnings of the ids of items, which the id of the answer's generation follows."""
TEXTS = ("input_text", "output_text", "text")
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
KINDS = ("message", "reasoning", *CALLS, *OUTPUTS, "item_reference")
FOREIGN = (
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
"""Items of tools that the policy never had, in a history that another model has written. They are left out."""


class OpenAIResponses(Dialect):
    prefix = "resp_"

    def read(self, fields: Fields, recorded: Recorded) -> ParsedRequest:
        is_stream = fields.flag("stream")
        instructions, previous = fields.text("instructions"), fields.text("previous_response_id")
        tools = response_tools(fields)
        messages = _messages(fields, instructions, recorded, tools)
        # An item may bring a tool once more, as it is from then on.
        offers = {tool.spec.name: tool for tool in with_names_apart(fields, tools)}
        tools = list(offers.values())
        request = ChatRequest(
            messages=messages,
            tools=tuple(tool.spec for tool in tools),
            tool_choice=openai_choice(fields, tools, is_nested=False),
            max_tokens=fields.integer("max_output_tokens", 1),
            template_options=template_options(fields),
            previous=id_without(self.prefix, previous),
            sampling=fields.numbers(*SAMPLING),
        )
        if previous is not None and request.previous is None:
            raise fields.refuse("previous_response_id", previous, f'the id of a response, "{self.prefix}..."')
        _check_options(fields)
        choice = request.tool_choice
        echoed = {
            "instructions": instructions,
            "previous_response_id": previous,
            "max_output_tokens": request.max_tokens,
            "tools": [_tool_body(tool) for tool in tools],
            "tool_choice": choice if choice in WORDS else {"type": "function", "name": choice},
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
        }
        return ParsedRequest(
            request=request,
            is_stream=is_stream,
            echoed=echoed,
            offers=offers,
            is_stored=fields.flag("store", default=True),
        )

    def body(self, parsed: ParsedRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        is_whole = answer.finish not in CUT_SHORT
        return self._response(parsed, answer, "completed" if is_whole else "incomplete") | {
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": _items(answer, parsed.offers),
            "usage": _usage(answer),
        }

    def events(self, parsed: ParsedRequest, answers: Sequence[Answer]) -> Iterator[bytes]:
        for number, (name, fields) in enumerate(self._steps(parsed, answers)):
            yield event({"type": name, "sequence_number": number, **fields}, name)

    def _steps(self, parsed: ParsedRequest, answers: Sequence[Answer]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names and the fields of the events."""
        (answer,) = answers
        begun = self._response(parsed, answer, "in_progress")
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(_items(answer, parsed.offers)):
            yield from _item_steps(index, item)
        whole = self.body(parsed, answers)
        yield f"response.{whole['status']}", {"response": whole}

    def error_event(self, error: SessionError) -> bytes:
        """Return the dialect's own fields and an `error` as in chat chunks, since OpenAI's library raises by that."""
        fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
        raised = openai_error(error.status, error.message, error.code, error.param)
        return event({"type": "error", **fields, **raised}, "error")

    def _response(self, parsed: ParsedRequest, answer: Answer, status: str) -> dict[str, Any]:
        return {
            "id": self.prefix + answer.answer_id,
            "object": "response",
            "created_at": parsed.created,
            "model": parsed.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **parsed.echoed,
        }


# -- requests ----------------------------------------------------------------------------------------------------------


def parse_input(body: Any, recorded: Recorded) -> ChatRequest:
    """Return a request whose prompt is only counted. Raises BadRequestError."""
    with_model = {"model": "", **body} if isinstance(body, Mapping) else body
    return OpenAIResponses().parse(with_model, 0, recorded).request


def _messages(
    fields: Fields, instructions: str | None, recorded: Recorded, tools: list[OfferedTool]
) -> tuple[Message, ...]:
    """Return the messages, and add the tools that are among the items to `tools`."""
    items = fields.take("input")
    if isinstance(items, str):
        messages = [Message(role=Role.user, content=items)]
    elif isinstance(items, list) and items:
        messages = _joined(list(_parsed_items(fields, items, recorded, tools)))
    else:
        messages = []
    if not messages:
        raise fields.refuse("input", items, "a string or a list of items, not empty")
    return (Message(role=Role.system, content=instructions), *messages) if instructions else tuple(messages)


def _parsed_items(
    fields: Fields, items: Sequence[Any], recorded: Recorded, tools: list[OfferedTool]
) -> Iterator[Message]:
    """Yield the items as messages of their own, without those that are left out and those that only bring tools."""
    follows_result = False
    for item in fields.each("input", items):
        kind = item.text("type", "message")
        if kind == "item_reference":
            item, kind = _referred(item, recorded)
        if kind == "additional_tools":
            tools += response_tools(item)
            item.ignore("id", "role", "status")
            item.end()
            continue
        if kind in FOREIGN:
            item.leave_out("type", kind, kind)
            continue
        message = _item(item, kind, follows_result)
        follows_result = message.role is Role.tool
        yield message


def _referred(fields: Fields, recorded: Recorded) -> tuple[Fields, str]:
    """Return the item that a reference names, as it was given, and its type."""
    item_id = fields.must_have_text("id")
    fields.end()
    for prefix, kinds in ((MESSAGE, ("message",)), (REASONING, ("reasoning",)), (CALL, CALLS), (CUSTOM_CALL, CALLS)):
        name = id_without(prefix, item_id) or ""
        answer = recorded(name.rpartition("_")[0] if kinds is CALLS else name)
        for item in () if answer is None else _items(answer, {}):
            if item["id"].partition("_")[2] == item_id.partition("_")[2] and item["type"] in kinds:
                return fields.within(item, fields.where), item["type"]
    raise fields.refuse("id", item_id, "the id of an item that this session has given")


def _item(fields: Fields, kind: str | None, follows_result: bool) -> Message:
    """Return one item as a message of its own. An image in a user's message that follows a tool's result was brought by
    the tool."""
    item_id = fields.text("id")
    fields.ignore("type", "status", "phase")
    match kind:
        case "message":
            role = ROLES[fields.choice("role", ROLES, "")]
            signature = id_without(MESSAGE, item_id) if role is Role.assistant else None
            is_brought = follows_result and role is Role.user
            content = joined_text(fields, "content", TEXTS, has_notes=is_brought)
            message = Message(role=role, content=content, signature=signature)
        case "reasoning":
            reasoning = joined_text(fields, "content", ("reasoning_text",))
            reasoning = reasoning or joined_text(fields, "summary", ("summary_text",))
            fields.ignore("summary")
            signature = fields.text("encrypted_content") or id_without(REASONING, item_id)
            message = Message(role=Role.assistant, reasoning=reasoning, signature=signature)
        case "function_call" | "custom_tool_call":
            message = Message(role=Role.assistant, tool_calls=(_call(fields, is_custom=kind == "custom_tool_call"),))
        case "function_call_output" | "custom_tool_call_output":
            output = joined_text(fields, "output", TEXTS, has_notes=True)
            message = Message(role=Role.tool, content=output, call_id=fields.must_have_text("call_id"))
            fields.ignore("caller", "name")
        case _:
            raise fields.refuse("type", kind, "one of " + ", ".join(f'"{word}"' for word in KINDS))
    fields.end()
    return message


def _call(fields: Fields, *, is_custom: bool) -> ToolCall:
    name = flat_name(fields.must_have_text("name"), fields.text("namespace"))
    arguments = custom_arguments(fields.must_have_text("input")) if is_custom else fields.must_have_text("arguments")
    fields.ignore("caller", PARSED_ARGUMENTS)
    return ToolCall(call_id=fields.must_have_text("call_id"), name=name, arguments=arguments)


def _joined(items: Sequence[Message]) -> list[Message]:
    """Join the reasoning, the text and the calls of one answer, which come as items in this order."""
    messages: list[Message] = []
    for item in items:
        last = messages[-1] if messages else None
        if last is not None and _continues(last, item):
            messages[-1] = replace(
                last,
                content=last.content or item.content,
                tool_calls=last.tool_calls + item.tool_calls,
                signature=last.signature or item.signature,
            )
        else:
            messages.append(item)
    return messages


def _continues(last: Message, item: Message) -> bool:
    """Return whether an item belongs to the same answer as the item before it."""
    if not last.role is item.role is Role.assistant or item.reasoning is not None:
        return False
    if None not in (last.signature, item.signature) and last.signature != item.signature:
        return False
    return bool(item.tool_calls) or not (last.content or last.tool_calls)


def _check_options(fields: Fields) -> None:
    if (text := fields.object("text")) is not None:
        text_format(text, "format")
        text.hint("verbosity", "medium")
        text.end()
    if (options := fields.object("stream_options")) is not None:
        options.ignore("include_obfuscation")
        options.end()


# -- answers -----------------------------------------------------------------------------------------------------------


def _items(answer: Answer, offers: Offers) -> list[dict[str, Any]]:
    reply, status = answer.message, "incomplete" if answer.finish in CUT_SHORT else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        items.append(
            {
                "type": "reasoning",
                "id": REASONING + answer.answer_id,
                "encrypted_content": answer.answer_id,
                "summary": [],
                "content": [{"type": "reasoning_text", "text": reply.reasoning}],
                "status": "completed",
            }
        )
    if reply.content or not reply.tool_calls:
        text = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        message_id = MESSAGE + answer.answer_id
        items.append({"type": "message", "id": message_id, "role": "assistant", "status": status, "content": [text]})
    places = enumerate(reply.tool_calls)
    return items + [_call_item(call, f"{answer.answer_id}_{index}", offers.get(call.name)) for index, call in places]


def _call_item(call: ToolCall, item_id: str, tool: OfferedTool | None) -> dict[str, Any]:
    """Return a call as the harness knows its tool; a call of a tool that was not offered has the policy's name."""
    is_custom = tool is not None and tool.is_custom
    item: dict[str, Any] = {
        "type": "custom_tool_call" if is_custom else "function_call",
        "id": (CUSTOM_CALL if is_custom else CALL) + item_id,
        "call_id": call.call_id,
        "name": call.name if tool is None else tool.name,
        "status": "completed",
    }
    if tool is not None and tool.namespace is not None:
        item["namespace"] = tool.namespace
    return item | ({"input": custom_input(call.arguments)} if is_custom else {"arguments": call.arguments})


def _item_steps(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of one item, which is added empty, filled, and done."""
    place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
    filled = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"], "content")
    empty = {filled: [] if filled == "content" else ""}
    yield "response.output_item.added", {"output_index": index, "item": item | empty | {"status": "in_progress"}}
    if filled == "arguments":
        name = "response.function_call_arguments"
        yield f"{name}.delta", {**place, "delta": item["arguments"]}
        yield f"{name}.done", {**place, "name": item["name"], "arguments": item["arguments"]}
    elif filled == "input":
        yield "response.custom_tool_call_input.delta", {**place, "delta": item["input"]}
        yield "response.custom_tool_call_input.done", {**place, "input": item["input"]}
    else:
        (part,) = item["content"]
        yield from _part_steps(place | {"content_index": 0}, part)
    yield "response.output_item.done", {"output_index": index, "item": item}


def _part_steps(place: dict[str, Any], part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    name, text = f"response.{part['type']}", part["text"]
    logprobs = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", {**place, "part": part | {"text": ""}}
    if text:
        yield f"{name}.delta", {**place, "delta": text, **logprobs}
    yield f"{name}.done", {**place, "text": text, **logprobs}
    yield "response.content_part.done", {**place, "part": part}


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, sampled = len(answer.prompt_ids), num_sampled_tokens([answer])
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.completion.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def _tool_body(tool: OfferedTool) -> dict[str, Any]:
    """Return a tool as the policy reads it."""
    return {
        "type": "function",
        "name": tool.spec.name,
        "description": tool.spec.description,
        "parameters": dict(tool.spec.parameters),
        "strict": False,
    }
