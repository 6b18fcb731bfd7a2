"""Anthropic Messages, and the counting of their tokens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rollout.http.answers import anthropic_error
from rollout.http.strict_json import parse_strictly
from rollout.sessions.dialects.contents import joined_text, tool_spec
from rollout.sessions.dialects.dialect import CUT_SHORT, Asked, event, num_prompt_tokens, num_sampled_tokens
from rollout.sessions.dialects.fields import Fields
from rollout.sessions.errors import SessionError
from rollout.sessions.messages import Answer, ChatRequest, Finish, Message, Role, ToolCall, ToolSpec

PREFIX = "msg_"
"""Of the `id` of an answer; the id of its generation follows. Blocks of thinking carry the latter as signature."""
SAMPLING = ("temperature", "top_p", "top_k")
BOOKKEEPING = (
    "metadata",
    "service_tier",
    "cache_control",
    "context_management",
    "diagnostics",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
)
"""What a client tells an operator or a cache: it changes no answer. The history comes whole with every request, and
`context_management` would only spare parts of it."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
PING = event({"type": "ping"}, "ping")


class AnthropicMessages:
    keepalive = PING

    def parse(self, body: Any, created: int) -> Asked:
        fields = Fields(body)
        model = fields.must_have_text("model")
        prompt = _prompt(fields)
        request = replace(
            prompt,
            max_tokens=fields.integer("max_tokens", 1),
            stop=fields.texts("stop_sequences"),
            sampling=fields.numbers(*SAMPLING),
        )
        is_stream = fields.flag("stream")
        if request.max_tokens is None:
            raise fields.refuse("max_tokens", None, "a positive integer")
        fields.end()
        return Asked(request=request, model=model, created=created, is_stream=is_stream)

    def body(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return _head(asked, answer) | {"content": _blocks(answer), **_stop(answer), "usage": _usage(answer)}

    def events(self, asked: Asked, answers: Sequence[Answer]) -> Iterator[bytes]:
        (answer,) = answers
        nothing_yet = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(answer)
        start = _head(asked, answer) | nothing_yet | {"usage": usage | {"output_tokens": 0}}
        yield event({"type": "message_start", "message": start}, "message_start")
        yield PING
        for index, block in enumerate(_blocks(answer)):
            empty, deltas = _in_parts(block)
            yield _block_event("start", index, content_block=empty)
            for delta in deltas:
                yield _block_event("delta", index, delta=delta)
            yield _block_event("stop", index)
        yield event({"type": "message_delta", "delta": _stop(answer), "usage": usage}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def error_event(self, error: SessionError) -> bytes:
        return event(anthropic_error(error.status, error.message, error.code), "error")


def parse_count(body: Any) -> ChatRequest:
    """A request whose prompt is only counted: it has no limit. Raises BadRequestError."""
    fields = Fields(body)
    fields.must_have_text("model")
    request = _prompt(fields)
    fields.end()
    return request


# -- requests ----------------------------------------------------------------------------------------------------------


def _prompt(fields: Fields) -> ChatRequest:
    request = ChatRequest(
        messages=_messages(fields),
        tools=tuple(_tool(tool) for tool in fields.items("tools")),
        tool_choice=_tool_choice(fields),
        template_options=_template_options(fields),
    )
    fields.ignore(*BOOKKEEPING)
    return request


BILLING = "x-anthropic-billing-header:"
"""Claude Code begins the system blocks with one for Anthropic's accounts, another in every request."""


def _messages(fields: Fields) -> tuple[Message, ...]:
    system = joined_text(fields, "system", without=BILLING)
    said = [message for each in fields.items("messages") for message in _message(each)]
    if not said:
        raise fields.refuse("messages", [], "a list of at least one message")
    if said[-1].role is Role.assistant:
        raise fields.refuse("messages", "(the last one is the assistant's)", "one that ends with the user's turn")
    return (Message(role=Role.system, content=system), *said) if system else tuple(said)


def _message(fields: Fields) -> list[Message]:
    """One message; of a user also the tool results in it, each a message of its own."""
    role = fields.choice("role", ("user", "assistant", "system"), "")
    content = fields.take("content")
    if isinstance(content, str):
        blocks = [Fields({"type": "text", "text": content}, fields.path("content"))]
    elif isinstance(content, list):
        blocks = [Fields(each, f"{fields.path('content')}[{index}]") for index, each in enumerate(content)]
    else:
        raise fields.refuse("content", content, "a string or a list of blocks")
    fields.end()
    if role == "assistant":
        return [_assistant(blocks)]
    return _others(Role(role), blocks)


def _others(role: Role, blocks: Sequence[Fields]) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []
    kinds = ("text", "tool_result") if role is Role.user else ("text",)

    def end_text() -> None:
        if texts:
            messages.append(Message(role=role, content="".join(texts)))
            texts.clear()

    for block in blocks:
        if block.choice("type", kinds, "") == "tool_result":
            end_text()
            messages.append(_tool_result(block))
        else:
            texts.append(_text(block))
    end_text()
    return messages or [Message(role=role)]


def _assistant(blocks: Sequence[Fields]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    signature: str | None = None
    for block in blocks:
        kind = block.choice("type", ("text", "thinking", "tool_use"), "")
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
    """An error is told by its text: no chat template knows `is_error`."""
    message = Message(
        role=Role.tool, content=joined_text(block, "content"), call_id=block.must_have_text("tool_use_id")
    )
    block.ignore("is_error", "cache_control")
    block.end()
    return message


def _tool(fields: Fields) -> ToolSpec:
    """A tool that the harness runs. Those that Anthropic runs, or that it has trained its models on, are refused."""
    fields.choice("type", ("custom",), "custom")
    fields.ignore("eager_input_streaming", "defer_loading", "input_examples", "allowed_callers")
    return tool_spec(fields, "input_schema")


def _tool_choice(fields: Fields) -> str:
    choice = fields.object("tool_choice")
    if choice is None:
        return "auto"
    kind = choice.choice("type", (*CHOICES, "tool"), "")
    choice.ignore("disable_parallel_tool_use")  # how many calls an answer has is the policy's matter
    name = choice.must_have_text("name") if kind == "tool" else CHOICES[kind]
    choice.end()
    return name


def _template_options(fields: Fields) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if (thinking := fields.object("thinking")) is not None:
        kind = thinking.choice("type", ("enabled", "disabled", "adaptive"), "")
        thinking.ignore("budget_tokens", "display")
        thinking.end()
        options |= {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}
    if (output := fields.object("output_config")) is not None:
        effort = output.text("effort")
        output.only("format")
        output.ignore("task_budget")
        output.end()
        options |= {} if effort is None else {"reasoning_effort": effort}
    return options


# -- answers -----------------------------------------------------------------------------------------------------------


def _head(asked: Asked, answer: Answer) -> dict[str, Any]:
    return {"id": PREFIX + answer.answer_id, "type": "message", "role": "assistant", "model": asked.model}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    said = answer.message
    blocks: list[dict[str, Any]] = []
    if said.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": answer.answer_id})
    if said.content:
        blocks.append({"type": "text", "text": said.content})
    blocks += [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _object(call.arguments)}
        for call in said.tool_calls
    ]
    return blocks


def _in_parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as a stream says it: empty at first, then what fills it."""
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


def _block_event(what: str, index: int, **fields: Any) -> bytes:
    return event({"type": f"content_block_{what}", "index": index, **fields}, f"content_block_{what}")


def _object(arguments: str) -> dict[str, Any]:
    """The dialect has no way to say arguments that are no JSON object: the harness gets them as the field "arguments",
    which its tool refuses in its own words."""
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
    """All ids of the prompt are input tokens, also those that came from the prefix cache: harnesses decide by them when
    to compact the conversation."""
    return {
        "input_tokens": num_prompt_tokens([answer]),
        "output_tokens": num_sampled_tokens([answer]),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
