"""Conversations to learn from, as records: lists of messages in the form of OpenAI's API, or in one of the older forms
that are made into them. A field that is not read is refused, with file, line and field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.data import parse_sources
from rollout.chat.messages import Message, Role, ToolSpec
from rollout.data.chats import Chat, ChatReader, messages_of, read_chat, read_tools
from rollout.data.sources import DataError, Record, records

FORMS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
)
"""The columns of the forms that are read: OpenAI's, ShareGPT's, TRL's and Alpaca's."""
SYSTEM = ("system", "developer")
ROLES = ("user", "assistant")
"""The two who speak in Alpaca's form."""
BESIDE = ("tools", "system", "input", "history")
COLUMNS = tuple(dict.fromkeys((*(name for form in FORMS for name in form), *BESIDE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Example: {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}"""

    place: str
    """File and line, or data set and row."""
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    learned: frozenset[int]
    """The numbers of the messages of the assistant that are learned: all without `"weight": 0`."""


def load_conversations(entries: str) -> list[Conversation]:
    """Load the conversations of `entries`, sources separated by commas. Raises DataError."""
    return [
        as_conversation(record, place)
        for source in parse_sources(entries)
        for place, record in records(source, COLUMNS)
    ]


def as_conversation(record: Record, place: str) -> Conversation:
    """Read a record. Raises DataError, which names `place` and the field."""
    chat = _chat(record, place)
    messages = tuple(map(Message.of, chat.messages))
    learned = frozenset(
        number
        for number, (message, weight) in enumerate(zip(messages, chat.weights, strict=True))
        if message.role is Role.assistant and weight is not False
    )
    if not learned:
        raise DataError(f"{place}: no message of the assistant is to be learned")
    tools = tuple(_spec(tool, place) for tool in read_tools(record.get("tools"), place))
    return Conversation(place=place, messages=messages, tools=tools, learned=learned)


# -- the forms of a row ------------------------------------------------------------------------------------------------


def _chat(record: Record, place: str) -> Chat:
    form = next((form for form in FORMS if all(record.get(name) is not None for name in form)), None)
    match form:
        case ("messages",) | ("conversations",):
            chat = read_chat(record[form[0]], place, form[0])
        case ("prompt", "completion"):
            chat = _completed(record, place)
        case ("instruction", "output"):
            chat = read_chat(_alpaca(record, place), place, "instruction")
        case _:
            forms = ", or ".join(" and ".join(map(repr, form)) for form in FORMS[1:])
            row = ", ".join(sorted(record))
            raise DataError(f"{place}: needs a list of messages under 'messages' (or {forms}); the row has {row}")
    system = record.get("system")
    if not system:
        return chat
    if not isinstance(system, str) or any(message["role"] in SYSTEM for message in chat.messages):
        raise DataError(f"{place}: column 'system' must be a text, and then no message is of the system")
    return Chat(({"role": "system", "content": system}, *chat.messages), (None, *chat.weights))


def _completed(record: Record, place: str) -> Chat:
    """Return the chat of a prompt and a completion, each of them a text or messages. Only the completion is learned."""
    reader = ChatReader(place)  # of both: a completion may begin with the results of calls in the prompt
    prompt, completion = (
        reader.read(messages_of(record[column], role), column)
        for column, role in (("prompt", "user"), ("completion", "assistant"))
    )
    return Chat((*prompt.messages, *completion.messages), (*(False for _ in prompt.messages), *completion.weights))


def _alpaca(record: Record, place: str) -> list[Record]:
    texts = {name: record.get(name) for name in ("instruction", "input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str | None):
            raise DataError(f"{place}: column {name!r} must be a text, is {type(text).__name__}")
    history = record.get("history") or []
    if not isinstance(history, list | tuple) or not all(map(_is_pair, history)):
        raise DataError(f"{place}: column 'history' must be a list of pairs of a question and its answer")
    question = "\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    pairs = [*history, (question, texts["output"])]
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(ROLES, pair, strict=True)]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _spec(tool: Record, place: str) -> ToolSpec:
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    known: Sequence[str] = ("name", "description", "parameters")
    if others := sorted(set(function) - set(known)):
        name = function["name"]
        raise DataError(f"{place}: tool {name!r}: {others[0]!r} is none of the fields {', '.join(known)}, strict")
    return ToolSpec(**function)
