"""The comparison of what messages say with what a chat template writes of them.

Templates leave out what they do not know, and change what they do not expect, without a word: reasoning, a second call,
the text beside a call, a system message in the middle.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.chat.messages import Message, Role, ToolSpec
from rollout.chat.parsing import split_reasoning

_THINK, _END_OF_THINK = "<think>", "</think>"
_REMOVED = "\0"
"""Stands where a part was, so that what is left and right of it is not read as one text."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A text that has to be there, in one of some forms."""

    name: str
    forms: tuple[str, ...]


def hidden_parts(message: Message, text: str) -> list[str]:
    """Return the parts of an assistant's message that `text`, which a template wrote of it alone, does not show.

    White space at the ends of a part may be missing.

    Returns:
        A subset of "content", "reasoning" and "calls", in this order.
    """
    parts: list[_Part] = []
    for call in message.tool_calls:
        parts.append(_Part("calls", (call.name,)))
        parts += [_Part("calls", forms) for forms in map(_forms, _values(call.arguments)) if all(forms)]
    parts += [_Part("content", (content,)) for content in _contents(message, text)]
    if message.reasoning is not None and message.reasoning.strip():
        parts.append(_Part("reasoning", (message.reasoning.strip(),)))
    missing = _missing(parts, text)
    return [name for name in ("content", "reasoning", "calls") if name in missing]


def hidden_context(messages: Sequence[Message], tools: Sequence[ToolSpec], text: str) -> list[str]:
    """Return what others say in a conversation, and which tools there are, as far as its text does not show it."""
    parts = [_Part(f"the tool {tool.name}", (tool.name,)) for tool in tools]
    for number, message in enumerate(messages):
        if message.role is not Role.assistant and message.content.strip():
            forms = _forms(message.content)
            written_anew = message.role is Role.tool and not any(form in text for form in forms)
            every = list(map(_forms, _values(message.content))) if written_anew else [forms]
            parts += [_Part(f"messages[{number}].content of the role {message.role.value}", some) for some in every]
        if message.name and message.role is not Role.tool:  # a result's is that of its call, which few templates show
            parts.append(_Part(f"messages[{number}].name", (message.name,)))
    return _missing(parts, text)


def _contents(message: Message, text: str) -> Iterator[str]:
    """Yield the content; the thoughts and the rest by themselves where the template takes them apart."""
    content = message.content
    if content.strip() not in text and content.lstrip().startswith(_THINK) and _END_OF_THINK in content:
        thoughts, content = split_reasoning(content, reasoning_open=False)
        if thoughts is not None and thoughts.strip():
            yield thoughts.strip()
    if content.strip():
        yield content.strip()


def _values(text: str) -> list[Any]:
    """Return the values and names in a JSON text, which a template may write in another way, or the text itself."""
    try:
        return list(_leaves(json.loads(text)))
    except (ValueError, RecursionError):
        return [text]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _forms(value: Any) -> tuple[str, ...]:
    """Return how templates write a value: as it is, in JSON, or as Python shows it."""
    if isinstance(value, str):
        text = value.strip()
        inner = (json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1], repr(text)[1:-1])
        return tuple(dict.fromkeys((text, *inner)))
    return tuple(dict.fromkeys((json.dumps(value), str(value))))


def _missing(parts: Sequence[_Part], text: str) -> list[str]:
    """Return the names of the parts for which `text` has no place of their own, each name once.

    Long parts take their places first: "Paris" is not found in the place of "It rains in Paris.". Of equal ones the
    first takes it.
    """
    missing: set[str] = set()
    for part in sorted(parts, key=lambda part: -len(part.forms[0])):
        form = next((form for form in part.forms if form in text), None)
        if form is None:
            missing.add(part.name)
        else:
            text = text.replace(form, _REMOVED, 1)
    return [name for name in dict.fromkeys(part.name for part in parts) if name in missing]
