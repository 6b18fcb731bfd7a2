"""What an answer's text says: reasoning, content and tool calls. Only harnesses read it; it is never trained."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rollout.sessions.messages import Message, Role, ToolCall, ToolSpec

_THINK, _END_OF_THINK = "<think>", "</think>"
_CALL, _END_OF_CALL = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"[ \t\r\n]*")  # JSON's own, not all of Unicode's


class AnswerParser(Protocol):
    def parse(
        self,
        text: str,
        call_id: Callable[[int], str],
        *,
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
        reasoning_open: bool = False,
    ) -> Message:
        """The answer as a message of the assistant. What is no well-formed tool call stays content.

        Args:
            text: What the response says, without its end token.
            call_id: The id of the answer's tool call number 0, 1, ...
            tools: Those that the prompt shows.
            options: The variables of the chat template that the prompt was rendered with.
            reasoning_open: Whether the prompt itself began the reasoning; see `leaves_reasoning_open`.
        """
        ...


class TagParser:
    """Reads `<think>...</think>` and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen3 does.

    Arguments are kept as the policy wrote them, letter by letter. Reasoning that was cut leaves no content. A last call
    may lack its end tag.
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
        """As `AnswerParser.parse`. `tools` and `options` make no difference."""
        reasoning, said = split_reasoning(text, reasoning_open)
        content, calls = split_calls(said, call_id)
        return Message(role=Role.assistant, content=content, reasoning=reasoning, tool_calls=calls)


def make_parser(tokenizer: Any, *, tool_parser: str | None = None, reasoning_parser: str | None = None) -> AnswerParser:
    """vLLM's parsers of these names, each of which is `TagParser`'s where it is None.

    Raises:
        ValueError: vLLM has no parser of that name. It says which there are.
    """
    if tool_parser is None and reasoning_parser is None:
        return TagParser()
    from rollout.engines.vllm.parsers import VllmParser  # ten seconds of imports

    return VllmParser(tokenizer, tool_parser=tool_parser, reasoning_parser=reasoning_parser)


def leaves_reasoning_open(prompt_end: str) -> bool:
    """Whether a prompt that ends so makes the response begin inside of reasoning.

    Example: True for "<|Assistant|><think>\\n" (DeepSeek-R1), False for "<|im_start|>assistant\\n".
    """
    return prompt_end.rstrip().endswith(_THINK)


def split_calls(said: str, call_id: Callable[[int], str]) -> tuple[str, tuple[ToolCall, ...]]:
    """The content without the calls that it has, and those."""
    kept: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := said.find(_CALL, position)) >= 0:
        found = _call_at(said, start)
        if found is None:
            end = start + len(_CALL)
            kept.append(said[position:end])
        else:
            name, arguments, end = found
            kept.append(said[position:start])
            calls.append(ToolCall(call_id=call_id(len(calls)), name=name, arguments=arguments))
        position = end
    content = "".join([*kept, said[position:]])
    return content.rstrip() if calls else content, tuple(calls)


def split_reasoning(text: str, reasoning_open: bool) -> tuple[str | None, str]:
    """Reasoning, if there is any, and the rest."""
    started = text.lstrip().startswith(_THINK)
    before, end, after = text.partition(_END_OF_THINK)
    if not (started or reasoning_open or (end and _THINK not in before and _CALL not in before)):
        return None, text
    if started:
        before = before.partition(_THINK)[2]
    return before.strip("\n") or None, after.lstrip("\n")


def _call_at(text: str, start: int) -> tuple[str, str, int] | None:
    """Name and arguments of the call whose tag is at `start`, and where it ends. None if it is malformed."""
    try:
        raw, end = _raw_members(text, start + len(_CALL))
        name, arguments = json.loads(raw["name"]), json.loads(raw["arguments"])
        as_written = raw["arguments"]
        if isinstance(arguments, str):  # JSON within a string
            as_written, arguments = arguments, json.loads(arguments)
    except (ValueError, KeyError, RecursionError):
        return None
    end = _skip_space(text, end)
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return None
    if text.startswith(_END_OF_CALL, end):
        return name, as_written, end + len(_END_OF_CALL)
    return (name, as_written, end) if end == len(text) else None


def _raw_members(text: str, position: int) -> tuple[dict[str, str], int]:
    """The members of the JSON object at `position`, their values as they are written, and where it ends.

    Raises:
        ValueError: there is no JSON object.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse)
    members = {}
    position, comma = _after(text, position, "{"), ","
    while comma == ",":
        key, position = decoder.raw_decode(text, _skip_space(text, position))
        if not isinstance(key, str):
            raise ValueError(f"key {key!r} is not a string")
        start = _skip_space(text, _after(text, position, ":"))
        _, position = decoder.raw_decode(text, start)
        members[key] = text[start:position]
        position = _skip_space(text, position) + 1
        comma = text[position - 1 : position]
    _after(text, position - 1, "}")
    return members, position


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return position if space is None else space.end()


def _after(text: str, position: int, char: str) -> int:
    position = _skip_space(text, position)
    if not text.startswith(char, position):
        raise ValueError(f"expected {char!r} at {position}")
    return position + 1


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
