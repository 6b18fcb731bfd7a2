"""Anthropic Messages, and the counting of their tokens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rollout.chat.messages import Answer, ChatRequest, Finish, Message, Role, ToolCall
from rollout.http.answers import anthropic_error
from rollout.http.guard import parse_strictly
from rollout.sessions.dialects.dialect import (
    CUT_SHORT,
    SAMPLING,
    Dialect,
    ParsedRequest,
    Recorded,
    end_by_rule,
    event,
    num_sampled_tokens,
    template_options,
    text_format,
)
from rollout.sessions.dialects.fields import Fields, joined_text, note
from rollout.sessions.dialects.rule import LeftOut
from rollout.sessions.dialects.tools import anthropic_choice, anthropic_tools
from rollout.sessions.errors import SessionError

BILLING = "x-anthropic-billing-header:"
"""The beginning of a system block that Claude Code adds for Anthropic's accounts, a different one in every request."""
FOREIGN = ("redacted_thinking", "server_tool_use", "mcp_tool_use", "container_upload")
"""Blocks of a history that another model has written: nobody can read them, or they call tools that the policy never
had. They are left out, as are the results of such tools."""
RESULT = "_tool_result"
"""The end of the types of results of tools that Anthropic runs, such as web_search_tool_result."""
PING = event({"type": "ping"}, "ping")


class AnthropicMessages(Dialect):
    """Blocks of thinking carry the id of the answer's generation as their signature."""

    prefix = "msg_"
    keepalive = PING

    def read(self, fields: Fields, recorded: Recorded) -> ParsedRequest:
        request = replace(
            _prompt(fields),
            max_tokens=fields.integer("max_tokens", 1),
            stop=fields.texts("stop_sequences"),
            sampling=fields.numbers(*SAMPLING),
        )
        if request.messages[-1].role is Role.assistant:
            raise fields.refuse("messages", "(the last one is the assistant's)", "one that ends with the user's turn")
        is_stream = fields.flag("stream")
        if request.max_tokens is None:
            raise fields.refuse("max_tokens", None, "a positive integer")
        return ParsedRequest(request=request, is_stream=is_stream)

    def body(self, parsed: ParsedRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return self._head(parsed, answer) | {"content": _blocks(answer), **_stop(answer), "usage": _usage(answer)}

    def events(self, parsed: ParsedRequest, answers: Sequence[Answer]) -> Iterator[bytes]:
        (answer,) = answers
        usage = _usage(answer)
        nothing_yet = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
        yield _event("message_start", message=self._head(parsed, answer) | nothing_yet)
        yield PING
        for index, block in enumerate(_blocks(answer)):
            empty, deltas = _in_parts(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_stop(answer), usage=usage)
        yield _event("message_stop")

    def error_event(self, error: SessionError) -> bytes:
        return event(anthropic_error(error.status, error.message, error.code), "error")

    def _head(self, parsed: ParsedRequest, answer: Answer) -> dict[str, Any]:
        return {"id": self.prefix + answer.answer_id, "type": "message", "role": "assistant", "model": parsed.model}


def parse_count(body: Any) -> ChatRequest:
    """Return a request whose prompt is only counted, so that it has no limit. Raises BadRequestError."""
    fields = Fields(body, left_out=LeftOut())
    fields.must_have_text("model")
    request = _prompt(fields)
    for name in ("max_tokens", "stop_sequences", "stream", *SAMPLING):
        fields.ignore(name)
    end_by_rule(fields)
    return request


# -- requests ----------------------------------------------------------------------------------------------------------


def _prompt(fields: Fields) -> ChatRequest:
    tools = anthropic_tools(fields)
    return ChatRequest(
        messages=_messages(fields),
        tools=tuple(tool.spec for tool in tools),
        tool_choice=anthropic_choice(fields, tools),
        template_options=_template_options(fields),
    )


def _messages(fields: Fields) -> tuple[Message, ...]:
    system = joined_text(fields, "system", without=BILLING)
    messages = [message for item in fields.items("messages") for message in _message(item)]
    if not messages:
        raise fields.refuse("messages", [], "a list of at least one message")
    return (Message(role=Role.system, content=system), *messages) if system else tuple(messages)


def _message(fields: Fields) -> list[Message]:
    """Return one message; the tool results in a user's message become messages of their own."""
    role = fields.choice("role", ("user", "assistant", "system"), "")
    content = fields.take("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise fields.refuse("content", content, "a string or a list of blocks")
    blocks = [*fields.each("content", content)]
    fields.end()
    return [_assistant(blocks)] if role == "assistant" else _texts_and_results(Role(role), blocks)


def _texts_and_results(role: Role, blocks: Sequence[Fields]) -> list[Message]:
    """Return the texts and results of a message. An image or a document beside a result was brought by the tool."""
    messages: list[Message] = []
    kinds = ("text", "tool_result") if role is Role.user else ("text",)
    follows_text = has_result = False
    for block in blocks:
        kind = block.text("type", "") or ""
        if kind not in kinds and not (has_result and kind):
            raise block.refuse("type", kind, "one of " + ", ".join(json.dumps(word) for word in kinds))
        has_result = has_result or kind == "tool_result"
        if kind == "tool_result":
            message = _tool_result(block)
        else:
            message = Message(role=role, content=_text(block) if kind == "text" else note(block, kind))
        if kind != "tool_result" and follows_text:
            messages[-1] = replace(message, content=messages[-1].content + message.content)
        else:
            messages.append(message)
        follows_text = kind != "tool_result"
    return messages or [Message(role=role)]


def _assistant(blocks: Sequence[Fields]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    signature: str | None = None
    for block in blocks:
        kind = block.text("type", "") or ""
        if kind in FOREIGN or kind.endswith(RESULT):
            block.leave_out("type", kind, kind)
            continue
        if kind not in ("text", "thinking", "tool_use"):
            raise block.refuse("type", kind, 'one of "text", "thinking", "tool_use"')
        if kind == "text":
            texts.append(_text(block))
        elif kind == "thinking":
            thoughts.append(block.must_have_text("thinking"))
            signature = block.text("signature") or signature
        else:
            arguments = json.dumps(block.mapping("input"), ensure_ascii=False)
            call_id, name = block.must_have_text("id"), block.must_have_text("name")
            calls.append(ToolCall(call_id=call_id, name=name, arguments=arguments))
            block.ignore("cache_control", "caller")
        block.end()
    return Message(
        role=Role.assistant,
        content="".join(texts),
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
        signature=signature,
    )


def _text(block: Fields) -> str:
    text = block.must_have_text("text")
    block.ignore("cache_control", "citations")
    block.end()
    return text


def _tool_result(block: Fields) -> Message:
    """Return the result as a message. `is_error` is a hint, because no chat template knows it: the text says it."""
    content = joined_text(block, "content", has_notes=True)
    message = Message(role=Role.tool, content=content, call_id=block.must_have_text("tool_use_id"))
    block.hint("is_error", False)
    block.ignore("cache_control")
    block.end()
    return message


def _template_options(fields: Fields) -> dict[str, Any]:
    options = template_options(fields)
    if (output := fields.object("output_config")) is not None:
        effort = output.text("effort")
        text_format(output, "format")
        output.hint("task_budget")
        output.end()
        options |= {} if effort is None else {"reasoning_effort": effort}
    text_format(fields, "output_format")
    return options


# -- answers -----------------------------------------------------------------------------------------------------------


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    reply = answer.message
    blocks: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": answer.answer_id})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    blocks += [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _object(call.arguments)}
        for call in reply.tool_calls
    ]
    return blocks


def _in_parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as a stream tells it: the empty block, and the deltas that fill it."""
    match block["type"]:
        case "thinking":
            thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
            signature = {"type": "signature_delta", "signature": block["signature"]}
            return block | {"thinking": "", "signature": ""}, [thinking, signature]
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            text = json.dumps(block["input"], ensure_ascii=False)
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. The dialect cannot express any others: these become the field
    "arguments", which the tool of the harness refuses in its own words."""
    try:
        value = parse_strictly(arguments.encode())
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _stop(answer: Answer) -> dict[str, Any]:
    if answer.finish in CUT_SHORT:
        reason = "max_tokens"
    elif answer.finish is Finish.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if answer.stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_string}


def _usage(answer: Answer) -> dict[str, Any]:
    """Return the usage, in which cached ids of the prompt are input tokens too: harnesses decide by the input tokens
    when to compact the conversation."""
    return {
        "input_tokens": len(answer.prompt_ids),
        "output_tokens": num_sampled_tokens([answer]),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
