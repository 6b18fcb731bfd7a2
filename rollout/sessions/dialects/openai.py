"""OpenAI's chat completions and completions, with the extra fields of vLLM that harnesses know."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from rollout.chat.messages import Answer, ChatRequest, Finish, Message, Role, ToolCall
from rollout.sessions.dialects.dialect import (
    CUT_SHORT,
    SAMPLING,
    Dialect,
    ParsedRequest,
    Recorded,
    event,
    num_sampled_tokens,
    template_options,
    text_format,
)
from rollout.sessions.dialects.fields import PARSED, PARSED_ARGUMENTS, Fields, joined_text
from rollout.sessions.dialects.tools import Offers, chat_tools, custom_arguments, custom_input, openai_choice

MAX_ANSWERS = 128
DONE = b"data: [DONE]\n\n"
ROLES = {"system": Role.system, "developer": Role.system, "user": Role.user, "assistant": Role.assistant}
EMPTY_IN_ANSWERS = ("refusal", "audio", "function_call", "annotations")
"""Fields of a message that the client's library sends back empty."""
COPIES = ("provider_specific_fields", "thinking_blocks", "reasoning_details", "reasoning_items")
"""Fields to which LiteLLM and others copy the reasoning of an answer, and which they send back."""


class _Choices(Dialect):
    """The base of both dialects: an answer is a list of choices, in chunks when it is streamed."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def body(self, parsed: ParsedRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(parsed, index, answer) for index, answer in enumerate(answers)]
        whole = self._head(parsed, answers, self.kind) | {"choices": choices, "usage": _usage(answers)}
        return whole | _prompt_ids(parsed, answers)

    def events(self, parsed: ParsedRequest, answers: Sequence[Answer]) -> Iterator[bytes]:
        head = self._head(parsed, answers, self.chunk_kind)
        with_usage = {"usage": None} if parsed.with_usage else {}
        only_in_first = _prompt_ids(parsed, answers)
        for index, answer in enumerate(answers):
            for choice in self._chunks(parsed, index, answer):
                yield event(head | {"choices": [choice]} | with_usage | only_in_first)
                only_in_first = {}
        if parsed.with_usage:
            yield event(head | {"choices": [], "usage": _usage(answers)})
        yield DONE

    @abstractmethod
    def _choice(self, parsed: ParsedRequest, index: int, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, answer: Answer) -> dict[str, Any]: ...

    def _chunks(self, parsed: ParsedRequest, index: int, answer: Answer) -> Iterator[dict[str, Any]]:
        yield self._choice(parsed, index, answer)

    def _head(self, parsed: ParsedRequest, answers: Sequence[Answer], kind: str) -> dict[str, Any]:
        answer_id = self.prefix + answers[0].answer_id
        return {"id": answer_id, "object": kind, "created": parsed.created, "model": parsed.model}

    def _tokens(self, parsed: ParsedRequest, answer: Answer) -> dict[str, Any]:
        """Return the fields of a choice about its tokens. With several answers each has the id of its generation."""
        request = parsed.request
        tokens: dict[str, Any] = {"logprobs": self._logprobs(answer) if request.wants_logprobs else None}
        if request.wants_token_ids:
            tokens["token_ids"] = answer.completion.token_ids.tolist()
        if request.num_answers > 1:
            tokens["answer_id"] = answer.answer_id
        return tokens


class OpenAIChat(_Choices):
    prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def read(self, fields: Fields, recorded: Recorded) -> ParsedRequest:
        is_stream, with_usage = _stream_options(fields)
        tools = chat_tools(fields)
        request = ChatRequest(
            messages=_messages(fields),
            tools=tuple(tool.spec for tool in tools),
            tool_choice=openai_choice(fields, tools, is_nested=True),
            max_tokens=_max_tokens(fields),
            stop=fields.texts("stop"),
            num_answers=fields.integer("n", 1, MAX_ANSWERS) or 1,
            template_options=template_options(fields),
            sampling=fields.numbers(*SAMPLING),
            wants_logprobs=fields.flag("logprobs"),
            wants_token_ids=fields.flag("return_token_ids"),
        )
        text_format(fields, "response_format")
        return ParsedRequest(
            request=request,
            is_stream=is_stream,
            with_usage=with_usage,
            offers={tool.spec.name: tool for tool in tools},
        )

    def _choice(self, parsed: ParsedRequest, index: int, answer: Answer) -> dict[str, Any]:
        reply = answer.message
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning is not None:
            message |= _reasoning(reply.reasoning)
        if reply.tool_calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [_call_body(call, parsed.offers) for call in reply.tool_calls]
        return {"index": index, "message": message, "finish_reason": _finish(answer)} | self._tokens(parsed, answer)

    def _chunks(self, parsed: ParsedRequest, index: int, answer: Answer) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one answer: first its role with all token ids, last the reason why it ended."""
        reply = answer.message
        deltas: list[dict[str, Any]] = []
        if reply.reasoning is not None:
            deltas.append(_reasoning(reply.reasoning))
        if reply.content:
            deltas.append({"content": reply.content})
        calls = [_call_body(call, parsed.offers) for call in reply.tool_calls]
        deltas += [{"tool_calls": [{"index": place} | call]} for place, call in enumerate(calls)]
        first = {"role": "assistant", "content": ""}
        yield {"index": index, "delta": first, "finish_reason": None} | self._tokens(parsed, answer)
        for delta in deltas:
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield {"index": index, "delta": {}, "logprobs": None, "finish_reason": _finish(answer)}

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        ids, logprobs = answer.completion.token_ids.tolist(), answer.completion.logprobs.tolist()
        content = [
            {"token": _token_name(token), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


class OpenAICompletions(_Choices):
    """Continues a text or token ids, without messages."""

    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def read(self, fields: Fields, recorded: Recorded) -> ParsedRequest:
        is_stream, with_usage = _stream_options(fields)
        request = ChatRequest(
            prompt=_prompt(fields),
            max_tokens=fields.integer("max_tokens", 1),
            stop=fields.texts("stop"),
            num_answers=fields.integer("n", 1, MAX_ANSWERS) or 1,
            sampling=fields.numbers(*SAMPLING),
            wants_logprobs=fields.integer("logprobs", 0, 1) is not None,  # only that of the sampled token is known
            wants_token_ids=fields.flag("return_token_ids"),
        )
        fields.only("best_of", request.num_answers)
        return ParsedRequest(request=request, is_stream=is_stream, with_usage=with_usage)

    def _choice(self, parsed: ParsedRequest, index: int, answer: Answer) -> dict[str, Any]:
        choice = {"index": index, "text": answer.message.content, "finish_reason": _finish(answer)}
        return choice | self._tokens(parsed, answer)

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        return {
            "tokens": [_token_name(token) for token in answer.completion.token_ids.tolist()],
            "token_logprobs": answer.completion.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": [],
        }


# -- requests ----------------------------------------------------------------------------------------------------------


def _messages(fields: Fields) -> tuple[Message, ...]:
    """Return the messages under `messages`."""
    messages: list[Message] = []
    for item in fields.items("messages"):
        messages.append(_message(item, follows_result=bool(messages) and messages[-1].role is Role.tool))
    if not messages:
        raise fields.refuse("messages", [], "a list of at least one message")
    return tuple(messages)


def _message(fields: Fields, *, follows_result: bool) -> Message:
    """Return a message. An image in a user's message that follows a tool's result was brought by the tool."""
    role = (ROLES | {"tool": Role.tool})[fields.choice("role", (*ROLES, "tool"), "")]
    is_brought = role is Role.tool or (role is Role.user and follows_result)
    content = joined_text(fields, "content", has_notes=is_brought)
    if role is Role.tool:
        fields.ignore("name")  # it is that of the call
    fields.hint("name")
    if role is Role.assistant:
        message = _assistant(fields, content)
    elif role is Role.tool:
        message = Message(role=role, content=content, call_id=fields.must_have_text("tool_call_id"))
    else:
        message = Message(role=role, content=content)
    fields.end()
    return message


def _assistant(fields: Fields, content: str) -> Message:
    calls = tuple(_call(item) for item in fields.items("tool_calls"))
    newer, older = fields.text("reasoning"), fields.text("reasoning_content")
    fields.ignore(PARSED, *COPIES)
    for name in EMPTY_IN_ANSWERS:
        fields.only(name, [])
    return Message(role=Role.assistant, content=content, reasoning=older if newer is None else newer, tool_calls=calls)


def _call(fields: Fields) -> ToolCall:
    kind = fields.choice("type", ("function", "custom"), "function")
    fields.ignore("index")
    call_id = fields.must_have_text("id")
    function = fields.must_have_object(kind, "an object with name and arguments")
    name = function.must_have_text("name")
    if kind == "custom":
        arguments = custom_arguments(function.must_have_text("input"))
    else:
        arguments = function.must_have_text("arguments")
    function.ignore(PARSED_ARGUMENTS)
    function.end()
    fields.end()
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    """Return one prompt: a string, token ids, or the only item of a list of these."""
    value = fields.take("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        (value,) = value
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and 0 <= token < 2**31 for token in value):
        return tuple(value)
    raise fields.refuse("prompt", value, "one text or one list of token ids, not empty")


def _stream_options(fields: Fields) -> tuple[bool, bool]:
    """Return whether the answer is a stream, and whether the stream ends with the usage."""
    is_stream, options = fields.flag("stream"), fields.object("stream_options")
    if options is None:
        return is_stream, False
    with_usage = options.flag("include_usage")
    options.ignore("include_obfuscation", "continuous_usage_stats")
    options.end()
    return is_stream, with_usage


def _max_tokens(fields: Fields) -> int | None:
    newer, older = (fields.integer(name, 1) for name in ("max_completion_tokens", "max_tokens"))
    return older if newer is None else newer


# -- answers -----------------------------------------------------------------------------------------------------------


def _prompt_ids(parsed: ParsedRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    return {"prompt_token_ids": list(answers[0].prompt_ids)} if parsed.request.wants_token_ids else {}


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the counts of real token ids. The prompt counts once, however many answers it has."""
    prompt, sampled = len(answers[0].prompt_ids), num_sampled_tokens(answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].completion.cached_tokens},
    }


def _token_name(token_id: int) -> str:
    """Return the id in place of the token's text, as vLLM does with return_tokens_as_token_ids: a single token need not
    be text."""
    return f"token_id:{token_id}"


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under vLLM's name and under the older one."""
    return {"reasoning": text, "reasoning_content": text}


def _call_body(call: ToolCall, offers: Offers) -> dict[str, Any]:
    if (tool := offers.get(call.name)) is not None and tool.is_custom:
        custom = {"name": tool.name, "input": custom_input(call.arguments)}
        return {"id": call.call_id, "type": "custom", "custom": custom}
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(answer: Answer) -> str:
    return Finish.length.value if answer.finish in CUT_SHORT else answer.finish.value
