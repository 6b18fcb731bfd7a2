"""The reading of an answer's text: reasoning, content and tool calls. Only harnesses see it, it is never trained."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.chat.messages import Message, Role, ToolCall, ToolSpec

_THINK, _END_OF_THINK = "<think>", "</think>"
_CALL, _END_OF_CALL = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"[ \t\r\n]*")  # JSON's own, not all of Unicode's
_ARGUMENTS = re.compile(r'"arguments"[ \t\r\n]*:[ \t\r\n]*')  # always a key: quotes within a string are escaped


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


class AnswerParser:
    """Reads `<think>...</think>` and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen3 writes them.

    Arguments are kept as the policy wrote them, letter by letter. An answer that was cut in its reasoning has no
    content. The last call may lack its end tag. Other formats are read by `VllmParser`.
    """

    def parse(
        self,
        text: str,
        call_id: Callable[[int], str],
        *,
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
        reasoning_open: bool = False,
    ) -> Message:
        """Return the answer as a message of the assistant. A malformed tool call stays content.

        Args:
            text: The text of the response, without its end token.
            call_id: The function that gives the id of the answer's tool call number 0, 1, ...
            tools: The tools that the prompt shows. Tags can be read without them.
            options: The variables of the chat template that the prompt was rendered with. Likewise.
            reasoning_open: True where the prompt itself began the reasoning; see `leaves_reasoning_open`.
        """
        reasoning, rest = split_reasoning(text, reasoning_open)
        content, calls = split_calls(rest, call_id)
        return Message(role=Role.assistant, content=content, reasoning=reasoning, tool_calls=calls)


def leaves_reasoning_open(prompt_end: str) -> bool:
    """Return whether the response to a prompt that ends so begins inside the reasoning.

    Example: True for "<|Assistant|><think>\\n" (DeepSeek-R1), False for "<|im_start|>assistant\\n".
    """
    return prompt_end.rstrip().endswith(_THINK)


def split_reasoning(text: str, reasoning_open: bool) -> tuple[str | None, str]:
    """Return the reasoning, if there is any, and the rest of the text."""
    is_tagged = text.lstrip().startswith(_THINK)
    before, end, after = text.partition(_END_OF_THINK)
    if not (is_tagged or reasoning_open or (end and _THINK not in before and _CALL not in before)):
        return None, text
    if is_tagged:
        before = before.partition(_THINK)[2]
    return before.strip("\n") or None, after.lstrip("\n")


def split_calls(text: str, call_id: Callable[[int], str]) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the content without its tool calls, and the calls."""
    kept: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := text.find(_CALL, position)) >= 0:
        call = _call_at(text, start)
        if call is None:
            end = start + len(_CALL)
            kept.append(text[position:end])
        else:
            name, arguments, end = call
            kept.append(text[position:start])
            calls.append(ToolCall.sampled(call_id(len(calls)), name, arguments))
        position = end
    content = "".join([*kept, text[position:]])
    return content.rstrip() if calls else content, tuple(calls)


def _call_at(text: str, start: int) -> tuple[str, str, int] | None:
    """Return name and arguments of the call whose tag is at `start`, and its end; None if it is malformed."""
    try:
        call, end = _JSON.raw_decode(text, _skip_space(text, start + len(_CALL)))
        name, arguments = call["name"], call["arguments"]
        # A harness sends back what it reads, and other spaces are other tokens: take the text, not the parsed value.
        values = (_raw_value(text, key.end()) for key in _ARGUMENTS.finditer(text, start, end))
        as_written = next(raw for raw, value in values if value == arguments)
        if isinstance(arguments, str):  # JSON within a string
            as_written, arguments = arguments, json.loads(arguments)
    except (ValueError, TypeError, KeyError, StopIteration, RecursionError):
        return None
    end = _skip_space(text, end)
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return None
    if text.startswith(_END_OF_CALL, end):
        return name, as_written, end + len(_END_OF_CALL)
    return (name, as_written, end) if end == len(text) else None


def _raw_value(text: str, start: int) -> tuple[str, Any]:
    """Return the JSON value at `start` as it is written and as it is meant."""
    value, end = _JSON.raw_decode(text, start)
    return text[start:end], value


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return position if space is None else space.end()
