"""OpenAI Responses: items instead of messages, and a conversation that may be kept on the server."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.http.answers import openai_error
from rollout.sessions.dialects.contents import PARSED_ARGUMENTS, joined_text, tool_spec
from rollout.sessions.dialects.dialect import (
    COMMENT,
    CUT_SHORT,
    Asked,
    event,
    id_without,
    num_prompt_tokens,
    num_sampled_tokens,
)
from rollout.sessions.dialects.fields import Fields
from rollout.sessions.dialects.openai_common import BOOKKEEPING
from rollout.sessions.errors import SessionError
from rollout.sessions.messages import Answer, ChatRequest, Message, Role, ToolCall, ToolSpec

PREFIX = "resp_"
"""Of the `id` of an answer; the id of its generation follows, as in the ids of its items."""
MESSAGE, REASONING, CALL = "msg_", "rs_", "fc_"
"""The same of items."""
SAMPLING = ("temperature", "top_p")
ROLES = {"system": Role.system, "developer": Role.system, "user": Role.user, "assistant": Role.assistant}
TEXTS = ("input_text", "output_text", "text")
KINDS = ("message", "reasoning", "function_call", "function_call_output")


class OpenAIResponses:
    keepalive = COMMENT

    def parse(self, body: Any, created: int) -> Asked:
        fields = Fields(body)
        model = fields.must_have_text("model")
        is_stream = fields.flag("stream")
        instructions, previous = fields.text("instructions"), fields.text("previous_response_id")
        tools = tuple(_tool(tool) for tool in fields.items("tools"))
        request = ChatRequest(
            messages=_messages(fields, instructions),
            tools=tools,
            tool_choice=_tool_choice(fields),
            max_tokens=fields.integer("max_output_tokens", 1),
            template_options=_template_options(fields),
            previous=id_without(PREFIX, previous),
            sampling=fields.numbers(*SAMPLING),
        )
        if previous is not None and request.previous is None:
            raise fields.refuse("previous_response_id", previous, f'the id of a response, "{PREFIX}..."')
        _only_defaults(fields)
        fields.end()
        echoed = {
            "instructions": instructions,
            "previous_response_id": previous,
            "max_output_tokens": request.max_tokens,
            "tools": [_tool_body(tool) for tool in tools],
            "tool_choice": _choice_body(request.tool_choice),
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
        }
        return Asked(request=request, model=model, created=created, is_stream=is_stream, echoed=echoed)

    def body(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        is_whole = answer.finish not in CUT_SHORT
        return _response(asked, answer, "completed" if is_whole else "incomplete") | {
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": _items(answer),
            "usage": _usage(answer),
        }

    def events(self, asked: Asked, answers: Sequence[Answer]) -> Iterator[bytes]:
        for number, (name, fields) in enumerate(self._steps(asked, answers)):
            yield event({"type": name, "sequence_number": number, **fields}, name)

    def _steps(self, asked: Asked, answers: Sequence[Answer]) -> Iterator[tuple[str, dict[str, Any]]]:
        (answer,) = answers
        begun = _response(asked, answer, "in_progress")
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(_items(answer)):
            yield from _item_steps(index, item)
        whole = self.body(asked, answers)
        yield f"response.{whole['status']}", {"response": whole}

    def error_event(self, error: SessionError) -> bytes:
        """With the fields of the dialect, and with an `error` as in chat chunks: by that OpenAI's library raises."""
        fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
        raised = openai_error(error.status, error.message, error.code, error.param)
        return event({"type": "error", **fields, **raised}, "error")


# -- requests ----------------------------------------------------------------------------------------------------------


def _messages(fields: Fields, instructions: str | None) -> tuple[Message, ...]:
    given = fields.take("input")
    if isinstance(given, str):
        said = [Message(role=Role.user, content=given)]
    elif isinstance(given, list) and given:
        said = _joined([_item(Fields(each, f"input[{index}]")) for index, each in enumerate(given)])
    else:
        raise fields.refuse("input", given, "a string or a list of items, not empty")
    return (Message(role=Role.system, content=instructions), *said) if instructions else tuple(said)


def _item(fields: Fields) -> Message:
    """One item as a message of its own."""
    kind = fields.choice("type", KINDS, "message")
    item_id = fields.text("id")
    fields.ignore("status", "phase")
    match kind:
        case "message":
            role = ROLES[fields.choice("role", ROLES, "")]
            signature = id_without(MESSAGE, item_id) if role is Role.assistant else None
            message = Message(role=role, content=joined_text(fields, "content", TEXTS), signature=signature)
        case "reasoning":
            thoughts = joined_text(fields, "content", ("reasoning_text",))
            thoughts = thoughts or joined_text(fields, "summary", ("summary_text",))
            fields.ignore("summary")
            signature = fields.text("encrypted_content") or id_without(REASONING, item_id)
            message = Message(role=Role.assistant, reasoning=thoughts, signature=signature)
        case "function_call":
            call = ToolCall(
                call_id=fields.must_have_text("call_id"),
                name=fields.must_have_text("name"),
                arguments=fields.must_have_text("arguments"),
            )
            fields.ignore("namespace", "caller", PARSED_ARGUMENTS)
            message = Message(role=Role.assistant, tool_calls=(call,))
        case _:
            output = joined_text(fields, "output", TEXTS)
            message = Message(role=Role.tool, content=output, call_id=fields.must_have_text("call_id"))
            fields.ignore("caller")
    fields.end()
    return message


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
    """Whether an item belongs to the same answer as the one before it."""
    if not last.role is item.role is Role.assistant or item.reasoning is not None:
        return False
    if None not in (last.signature, item.signature) and last.signature != item.signature:
        return False
    return bool(item.tool_calls) or not (last.content or last.tool_calls)


def _tool(fields: Fields) -> ToolSpec:
    """A function that the harness runs. Those that OpenAI runs are refused."""
    fields.choice("type", ("function",), "")
    fields.ignore("defer_loading", "allowed_callers", "output_schema")
    return tool_spec(fields)


def _tool_choice(fields: Fields) -> str:
    words = ("auto", "none", "required")
    choice = fields.take("tool_choice")
    if choice is None or choice in words:
        return choice or "auto"
    if not isinstance(choice, Mapping):
        raise fields.refuse("tool_choice", choice, f"one of {', '.join(words)} or a function")
    named = Fields(choice, fields.path("tool_choice"))
    named.choice("type", ("function",), "")
    name = named.must_have_text("name")
    named.end()
    return name


def _template_options(fields: Fields) -> dict[str, Any]:
    if (reasoning := fields.object("reasoning")) is None:
        return {}
    effort = reasoning.text("effort")
    reasoning.ignore("summary", "generate_summary", "context", "mode")
    reasoning.end()
    return {} if effort is None else {"reasoning_effort": effort}


def _only_defaults(fields: Fields) -> None:
    fields.only("background", False)
    fields.only("truncation", "disabled")
    fields.only("include", [], ["reasoning.encrypted_content"])
    fields.only("top_logprobs", 0)
    if (text := fields.object("text")) is not None:
        text.only("format", {"type": "text"})
        text.ignore("verbosity")
        text.end()
    if (options := fields.object("stream_options")) is not None:
        options.ignore("include_obfuscation")
        options.end()
    fields.ignore(*BOOKKEEPING, "client_metadata")


# -- answers -----------------------------------------------------------------------------------------------------------


def _response(asked: Asked, answer: Answer, status: str) -> dict[str, Any]:
    return {
        "id": PREFIX + answer.answer_id,
        "object": "response",
        "created_at": asked.created,
        "model": asked.model,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **asked.echoed,
    }


def _items(answer: Answer) -> list[dict[str, Any]]:
    said, status = answer.message, "incomplete" if answer.finish in CUT_SHORT else "completed"
    items: list[dict[str, Any]] = []
    if said.reasoning is not None:
        thoughts = {"type": "reasoning_text", "text": said.reasoning}
        ids = {"id": REASONING + answer.answer_id, "encrypted_content": answer.answer_id}
        items.append({"type": "reasoning", **ids, "summary": [], "content": [thoughts], "status": "completed"})
    if said.content or not said.tool_calls:
        text = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}
        message_id = MESSAGE + answer.answer_id
        message = {"type": "message", "id": message_id, "role": "assistant", "status": status, "content": [text]}
        items.append(message)
    for index, call in enumerate(said.tool_calls):
        ids = {"id": f"{CALL}{answer.answer_id}_{index}", "call_id": call.call_id}
        named = {"name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", **ids, **named, "status": "completed"})
    return items


def _item_steps(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one item: it is added empty, filled, and done."""
    at: dict[str, Any] = {"item_id": item["id"], "output_index": index}
    is_call = item["type"] == "function_call"
    empty = {"arguments": ""} if is_call else {"content": []}
    yield "response.output_item.added", {"output_index": index, "item": item | empty | {"status": "in_progress"}}
    if is_call:
        name = "response.function_call_arguments"
        yield f"{name}.delta", {**at, "delta": item["arguments"]}
        yield f"{name}.done", {**at, "name": item["name"], "arguments": item["arguments"]}
    else:
        (part,) = item["content"]
        yield from _part_steps(at | {"content_index": 0}, part)
    yield "response.output_item.done", {"output_index": index, "item": item}


def _part_steps(at: dict[str, Any], part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    name, text = f"response.{part['type']}", part["text"]
    logprobs = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", {**at, "part": part | {"text": ""}}
    if text:
        yield f"{name}.delta", {**at, "delta": text, **logprobs}
    yield f"{name}.done", {**at, "text": text, **logprobs}
    yield "response.content_part.done", {**at, "part": part}


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, sampled = num_prompt_tokens([answer]), num_sampled_tokens([answer])
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.completion.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def _tool_body(tool: ToolSpec) -> dict[str, Any]:
    named = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", **named, "strict": False}


def _choice_body(choice: str) -> Any:
    return choice if choice in ("auto", "none", "required") else {"type": "function", "name": choice}
