"""OpenAI chat completions, with the extra fields of vLLM that harnesses know."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollout.sessions.dialects.contents import PARSED, PARSED_ARGUMENTS, joined_text, tool_spec
from rollout.sessions.dialects.dialect import COMMENT, CUT_SHORT, Asked, event
from rollout.sessions.dialects.fields import Fields
from rollout.sessions.dialects.openai_common import (
    BOOKKEEPING,
    DONE,
    MAX_ANSWERS,
    SAMPLING,
    openai_error_event,
    openai_usage,
    prompt_ids,
    stream_options,
    token_name,
)
from rollout.sessions.errors import SessionError
from rollout.sessions.messages import Answer, ChatRequest, Finish, Message, Role, ToolCall, ToolSpec

PREFIX = "chatcmpl-"
"""Of the `id` of an answer; the id of its generation follows."""
ROLES = {"system": Role.system, "developer": Role.system, "user": Role.user, "assistant": Role.assistant}
ROLES["tool"] = Role.tool
EMPTY_IN_ANSWERS = ("refusal", "audio", "function_call", "annotations")
"""Fields of a message that the client's library sends back empty."""
COPIES = ("provider_specific_fields", "thinking_blocks", "reasoning_details", "reasoning_items")
"""Where LiteLLM and others copy an answer's reasoning to, and send it back."""


class OpenAIChat:
    keepalive = COMMENT

    def parse(self, body: Any, created: int) -> Asked:
        fields = Fields(body)
        model = fields.must_have_text("model")
        is_stream, with_usage = stream_options(fields)
        wants_logprobs = fields.flag("logprobs")
        fields.only("top_logprobs", 0)
        request = ChatRequest(
            messages=messages_of(fields),
            tools=tuple(tool_of(tool) for tool in fields.items("tools")),
            tool_choice=_tool_choice(fields),
            max_tokens=_max_tokens(fields),
            stop=fields.texts("stop"),
            num_answers=fields.integer("n", 1, MAX_ANSWERS) or 1,
            template_options=_template_options(fields),
            sampling=fields.numbers(*SAMPLING),
            wants_logprobs=wants_logprobs,
            wants_token_ids=fields.flag("return_token_ids"),
        )
        _only_defaults(fields)
        fields.ignore(*BOOKKEEPING)
        fields.end()
        return Asked(request=request, model=model, created=created, is_stream=is_stream, with_usage=with_usage)

    def body(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [_choice(asked, index, answer) for index, answer in enumerate(answers)]
        whole = _head(asked, answers, "chat.completion") | {"choices": choices, "usage": openai_usage(answers)}
        return whole | prompt_ids(asked, answers)

    def events(self, asked: Asked, answers: Sequence[Answer]) -> Iterator[bytes]:
        head = _head(asked, answers, "chat.completion.chunk")
        with_usage = {"usage": None} if asked.with_usage else {}
        first = prompt_ids(asked, answers)
        for index, answer in enumerate(answers):
            for choice in _deltas(asked, index, answer):
                yield event(head | {"choices": [choice]} | with_usage | first)
                first = {}
        if asked.with_usage:
            yield event(head | {"choices": [], "usage": openai_usage(answers)})
        yield DONE

    def error_event(self, error: SessionError) -> bytes:
        return openai_error_event(error)


# -- requests ----------------------------------------------------------------------------------------------------------


def messages_of(fields: Fields) -> tuple[Message, ...]:
    """Those under `messages`."""
    messages = tuple(_message(each) for each in fields.items("messages"))
    if not messages:
        raise fields.refuse("messages", [], "a list of at least one message")
    return messages


def _message(fields: Fields) -> Message:
    role = ROLES[fields.choice("role", ROLES, "")]
    content = joined_text(fields, "content")
    fields.ignore("name")
    if role is Role.assistant:
        message = _assistant(fields, content)
    elif role is Role.tool:
        message = Message(role=role, content=content, call_id=fields.must_have_text("tool_call_id"))
    else:
        message = Message(role=role, content=content)
    fields.end()
    return message


def _assistant(fields: Fields, content: str) -> Message:
    calls = tuple(_call(each) for each in fields.items("tool_calls"))
    newer, older = fields.text("reasoning"), fields.text("reasoning_content")
    fields.ignore(PARSED, *COPIES)
    for name in EMPTY_IN_ANSWERS:
        fields.only(name, [])
    return Message(role=Role.assistant, content=content, reasoning=older if newer is None else newer, tool_calls=calls)


def _call(fields: Fields) -> ToolCall:
    fields.choice("type", ("function",), "function")
    fields.ignore("index")
    call_id, function = fields.must_have_text("id"), fields.object("function")
    if function is None:
        raise fields.refuse("function", None, "an object with name and arguments")
    call = ToolCall(
        call_id=call_id, name=function.must_have_text("name"), arguments=function.must_have_text("arguments")
    )
    function.ignore(PARSED_ARGUMENTS)
    function.end()
    fields.end()
    return call


def tool_of(fields: Fields) -> ToolSpec:
    fields.choice("type", ("function",), "")
    function = fields.object("function")
    if function is None:
        raise fields.refuse("function", None, "an object with name and parameters")
    fields.ignore("cache_control")
    fields.end()
    return tool_spec(function)


def _tool_choice(fields: Fields) -> str:
    words = ("auto", "none", "required")
    choice = fields.take("tool_choice")
    if choice is None or choice in words:
        return choice or "auto"
    if not isinstance(choice, Mapping):
        raise fields.refuse("tool_choice", choice, f"one of {', '.join(words)} or a function")
    named = Fields(choice, fields.path("tool_choice"))
    named.choice("type", ("function",), "")
    function = named.object("function") or Fields({}, named.path("function"))
    named.end()
    name = function.must_have_text("name")
    function.end()
    return name


def _max_tokens(fields: Fields) -> int | None:
    newer, older = (fields.integer(name, 1) for name in ("max_completion_tokens", "max_tokens"))
    return older if newer is None else newer


def _template_options(fields: Fields) -> dict[str, Any]:
    effort = fields.text("reasoning_effort")
    return {**({} if effort is None else {"reasoning_effort": effort}), **fields.mapping("chat_template_kwargs")}


def _only_defaults(fields: Fields) -> None:
    """What would need an engine that is told how to answer, or a policy that is not a text model."""
    fields.only("response_format", {"type": "text"})
    fields.only("modalities", ["text"])
    fields.only("logit_bias", {})
    fields.only("verbosity", "medium")
    fields.only("add_generation_prompt", True)
    fields.only("continue_final_message", False)
    fields.only("include_reasoning", True)


# -- answers -----------------------------------------------------------------------------------------------------------


def _head(asked: Asked, answers: Sequence[Answer], kind: str) -> dict[str, Any]:
    answer_id = PREFIX + answers[0].answer_id
    return {"id": answer_id, "object": kind, "created": asked.created, "model": asked.model}


def _choice(asked: Asked, index: int, answer: Answer) -> dict[str, Any]:
    said = answer.message
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.reasoning is not None:
        message |= _reasoning(said.reasoning)
    if said.tool_calls:
        message["content"] = said.content or None
        message["tool_calls"] = [_call_body(call) for call in said.tool_calls]
    return {"index": index, "message": message, "finish_reason": _finish(answer)} | _tokens(asked, answer)


def _deltas(asked: Asked, index: int, answer: Answer) -> Iterator[dict[str, Any]]:
    """The chunks of one answer: its role first, with the token ids of all of it, and why it ended last."""
    said = answer.message
    deltas: list[dict[str, Any]] = []
    if said.reasoning is not None:
        deltas.append(_reasoning(said.reasoning))
    if said.content:
        deltas.append({"content": said.content})
    deltas += [{"tool_calls": [{"index": place} | _call_body(call)]} for place, call in enumerate(said.tool_calls)]
    first = {"role": "assistant", "content": ""}
    yield {"index": index, "delta": first, "finish_reason": None} | _tokens(asked, answer)
    for delta in deltas:
        yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    yield {"index": index, "delta": {}, "logprobs": None, "finish_reason": _finish(answer)}


def _reasoning(text: str) -> dict[str, str]:
    """Under vLLM's name and under the older one."""
    return {"reasoning": text, "reasoning_content": text}


def _call_body(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(answer: Answer) -> str:
    return Finish.length.value if answer.finish in CUT_SHORT else answer.finish.value


def _tokens(asked: Asked, answer: Answer) -> dict[str, Any]:
    """What a choice says of its tokens. With several answers each also has the id of its own generation."""
    ids, logprobs = answer.completion.token_ids.tolist(), answer.completion.logprobs.tolist()
    found: dict[str, Any] = {"logprobs": None}
    if asked.request.wants_logprobs:
        content = [
            {"token": token_name(token), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        found["logprobs"] = {"content": content, "refusal": None}
    if asked.request.wants_token_ids:
        found["token_ids"] = ids
    if asked.request.num_answers > 1:
        found["answer_id"] = answer.answer_id
    return found
