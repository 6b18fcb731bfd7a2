"""Conversations to learn from, as records: lists of messages in the form of OpenAI's API.

Data sets write them more loosely than a client does, so some things may lack that an answer of the API has: the ids and
types of calls. Anything else that is not read is refused, with file, line and field.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.data import parse_sources
from rollout.data.sources import DataError, Record, records
from rollout.sessions.dialects.fields import Fields
from rollout.sessions.dialects.openai_chat import messages_of, tool_of
from rollout.sessions.errors import BadRequestError
from rollout.sessions.messages import Message, Role, ToolSpec

COLUMNS = ("messages", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Example: {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}"""

    place: str
    """File and line, or data set and row."""
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    learned: frozenset[int]
    """The numbers of the assistant's messages that are learned: those without `"weight": 0`."""


def load_conversations(entries: str) -> list[Conversation]:
    """Load those of `entries`, sources separated by commas. Raises DataError."""
    return [
        as_conversation(record, place)
        for source in parse_sources(entries)
        for place, record in records(source, COLUMNS)
    ]


def as_conversation(record: Record, place: str) -> Conversation:
    """Raises DataError, which names `place` and the field."""
    messages, tools = (record.get(column) for column in COLUMNS)
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"{place}: needs a list of messages under 'messages'; the row has {', '.join(sorted(record))}")
    weights = [_weight(message, number, place) for number, message in enumerate(messages)]
    try:
        found = messages_of(Fields({"messages": list(_as_sent(messages))}))
        found_tools = tuple(map(tool_of, Fields({"tools": tools}).items("tools")))
    except BadRequestError as error:
        raise DataError(f"{place}: {error}") from error
    learned = frozenset(
        number for number, message in enumerate(found) if message.role is Role.assistant and weights[number]
    )
    if not learned:
        raise DataError(f"{place}: no message of the assistant is to be learned")
    return Conversation(place=place, messages=found, tools=found_tools, learned=learned)


def _weight(message: Mapping[str, Any], number: int, place: str) -> bool:
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(f"{place}: messages[{number}].weight = {weight!r}: allowed is 0 or 1")
    return weight != 0


def _as_sent(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """As a client sends them: with an id for each call, and for each result."""
    pending: list[str] = []
    for number, message in enumerate(messages):
        sent = {name: value for name, value in message.items() if name != "weight"}
        calls = sent.get("tool_calls")
        if isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls):
            sent["tool_calls"] = [_call(call, f"call_{number}_{index}") for index, call in enumerate(calls)]
            pending = [call["id"] for call in sent["tool_calls"]]
        elif sent.get("role") == "tool" and sent.get("tool_call_id") is None and pending:
            sent["tool_call_id"] = pending.pop(0)
        yield sent


def _call(call: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    function = call.get("function")
    sent = {"type": "function", **call, "id": call.get("id") or call_id}
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
        arguments = {name: value for name, value in function["arguments"].items() if value is not None}
        sent["function"] = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return sent
