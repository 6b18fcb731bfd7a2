"""Messages and tools as data sets write them. Every field is kept or refused, by its place and name.

Data sets write OpenAI's format more loosely than a client does: ids and types of calls may lack, arguments are objects
or JSON text, tools are bare functions, a whole column is JSON text (parquet has no other way to hold tools of several
schemas), and ShareGPT has `from` and `value` for `role` and `content`.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from rollout.data.sources import DataError, Record

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
"""Values of ShareGPT's `from`, besides the roles themselves."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that data sets have for the reasoning of an answer. The first is the one that is kept."""
LEARNED = ("weight", "train", "loss")
"""The names that data sets have for whether a message is learned: 0 and 1, or false and true."""
FIELDS = ("role", "content", "name", *REASONING, "tool_calls", "tool_call_id", *LEARNED, "id")
"""The fields of a message. `id` says nothing to a model, and is left out."""
OF_ASSISTANT = (*REASONING, "tool_calls")
ALWAYS_EMPTY = ("refusal", "audio", "function_call", "annotations")
"""Fields that OpenAI's library writes, too, and that must be empty."""
_BEGINS_AS_MESSAGES = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content|from|value)\1\s*:""")
MAX_SHOWN = 80
"""The characters of a value that an error repeats."""


@dataclass(frozen=True, slots=True)
class Chat:
    messages: tuple[Record, ...]
    """In the form of OpenAI's API. Every call has an id and a type, and its arguments are an object where they are
    one."""
    weights: tuple[bool | None, ...]
    """True for each message that is to be learned, false for others; None where it does not say."""


def read_chat(value: Any, place: str, column: str) -> Chat:
    """Read the messages in a column: a list, or one as JSON text. Raises DataError, which names place and field."""
    return ChatReader(place).read(value, column)


def read_tools(value: Any, place: str, column: str = "tools") -> tuple[Record, ...]:
    """Read the tools in a column: a list, one as JSON text, or null. Raises DataError, which names place and field."""
    items = _as_list(value) if value not in (None, "") else []
    if not isinstance(items, list):
        raise DataError(f"{place}: column {column!r} must be a list of tools, is {type(value).__name__}")
    tools = tuple(_tool(item, f"{place}: {column}[{number}]") for number, item in enumerate(items))
    _check_text(tools, f"{place}: column {column!r}")
    return tools


def _as_list(value: Any) -> Any:
    """Return a list for what is one, or is one as JSON text; any other value as it is."""
    if isinstance(value, tuple):
        return list(value)
    parsed = _from_json(value)
    return parsed if isinstance(parsed, list) else value


def _is_chat(value: Any) -> bool:
    """Return whether a column holds messages: a list, or JSON text of a list of objects with roles. Other JSON text is
    what a user or a policy may say. Text that begins as messages do counts, too, so that it is refused where it is not
    JSON, as what Python writes of a list."""
    if not isinstance(value, str):
        return isinstance(value, list | tuple)
    if not isinstance(items := _as_list(value), list):
        return _BEGINS_AS_MESSAGES.match(value) is not None
    return bool(items) and all(map(_is_message, items))


def messages_of(value: Any, role: str) -> Any:
    """Return the messages in a column, in which a plain text is one message of the role."""
    return [{"role": role, "content": value}] if isinstance(value, str) and not _is_chat(value) else value


class ChatReader:
    """Reads the messages of one conversation in order, from one column or more: a result without an id belongs to the
    next open call."""

    def __init__(self, place: str):
        self._place = place
        self._names: dict[str, str] = {}
        """The function of each call so far, by its id."""
        self._open: list[tuple[str, str]] = []
        """The ids and functions of the latest answer's calls, as far as results have not taken them."""

    def read(self, value: Any, column: str) -> Chat:
        """Read the messages in a column as `read_chat` does."""
        items = _as_list(value)
        if not isinstance(items, list):
            kind = "a text that is not JSON" if isinstance(value, str) else type(value).__name__
            raise DataError(f"{self._place}: column {column!r} must be a list of messages, is {kind}")
        if not items:
            raise _refused(f"{self._place}: {column}", items, "a list of at least one message")
        messages = [self._message(item, f"{self._place}: {column}[{number}]") for number, item in enumerate(items)]
        _check_text([message for message, _ in messages], f"{self._place}: column {column!r}")
        return Chat(tuple(message for message, _ in messages), tuple(weight for _, weight in messages))

    def _message(self, item: Any, where: str) -> tuple[Record, bool | None]:
        """Return the message and its weight."""
        fields = _fields(item, where)
        role = fields.pop("role", None)
        if role not in ROLES:
            raise _refused(f"{where}.role", role, f"one of {', '.join(ROLES)}")
        _check_role(role, fields, where)
        weight = _weight(fields, where)
        message: Record = {"role": role, "content": _content(fields.get("content"), f"{where}.content")}
        if (name := _text(fields, "name", where)) is not None:
            message["name"] = name
        if role == "assistant":
            message |= _reasoning(fields, where)
            if calls := self._calls(fields.get("tool_calls"), f"{where}.tool_calls"):
                message["tool_calls"] = calls
        elif role == "tool":
            message |= self._result(_text(fields, "tool_call_id", where), name)
        return message, weight

    def _calls(self, value: Any, where: str) -> list[Record]:
        if value is None:
            return []
        if not isinstance(calls := _as_list(value), list):
            raise _refused(where, value, "a list of calls")
        read = [self._call(call, f"{where}[{number}]") for number, call in enumerate(calls)]
        self._open = [(call["id"], call["function"]["name"]) for call in read]
        return read

    def _call(self, call: Any, where: str) -> Record:
        call = _from_json(call)
        if isinstance(call, Mapping) and "function" not in call and "name" in call:
            call = {
                **_without(call, "name", "arguments"),
                "function": {name: call[name] for name in ("name", "arguments") if name in call},
            }
        call = _object(call, ("id", "type", "function", "index"), where)
        if call.get("type") not in (None, "function"):
            raise _refused(f"{where}.type", call["type"], '"function"')
        function = _object(call.get("function"), ("name", "arguments"), f"{where}.function")
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name:
            raise _refused(f"{where}.function.name", name, "a name")
        if arguments is not None and not isinstance(arguments, str | Mapping):
            raise _refused(f"{where}.function.arguments", arguments, "an object, or one as JSON text")
        parsed = _from_json(arguments)
        call_id = call.get("id") or self._new_id()
        if not isinstance(call_id, str):
            raise _refused(f"{where}.id", call_id, "a string")
        self._names[call_id] = name
        shown = dict(parsed) if isinstance(parsed, Mapping) else (arguments or {})
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": shown}}

    def _new_id(self) -> str:
        """Return an id that no call has: nine letters and digits, as Mistral's templates want."""
        return next(call_id for number in count(len(self._names)) if (call_id := f"call{number:05}") not in self._names)

    def _result(self, call_id: str | None, name: str | None) -> Record:
        """Return the fields of a tool's result: the id and the name of its call, where there is one."""
        call = next((call for call in self._open if call_id in (None, call[0])), None)
        if call is not None:
            self._open.remove(call)
            call_id = call[0]
        named = call[1] if call is not None else self._names.get(call_id or "")
        fields = {"tool_call_id": call_id, "name": named if name is None else name}
        return {key: value for key, value in fields.items() if value is not None}


def _fields(item: Any, where: str) -> Record:
    """Return the fields that say something, under the names of OpenAI's API."""
    if not isinstance(item, Mapping):
        raise _refused(where, item, "an object with role and content")
    fields = {name: value for name, value in item.items() if value is not None}
    if "from" in fields and "role" not in fields:
        fields = _from_sharegpt(fields, where)
    for name in ALWAYS_EMPTY:
        if fields.pop(name, None) not in (None, [], "", {}):
            raise _refused(f"{where}.{name}", item[name], "only null; calls belong into tool_calls")
    for name, value in fields.items():
        if name not in FIELDS:
            raise _refused(f"{where}.{name}", value, f"one of these fields: {', '.join(FIELDS)}")
    return {name: value for name, value in fields.items() if name in ("role", "content") or value not in ("", [])}


def _check_role(role: str, fields: Record, where: str) -> None:
    for name in OF_ASSISTANT:
        if name in fields and role != "assistant":
            raise _refused(f"{where}.{name}", fields[name], "only in a message of the assistant")
    if "tool_call_id" in fields and role != "tool":
        raise _refused(f"{where}.tool_call_id", fields["tool_call_id"], "only in a message of a tool")
    says = ("content", *OF_ASSISTANT) if role == "assistant" else ("content",)
    if role != "tool" and not any(name in fields for name in says):  # a tool may return nothing
        raise _refused(f"{where}.content", None, "a string or a list of text parts")


def _weight(fields: Record, where: str) -> bool | None:
    weights = {name: fields[name] for name in LEARNED if name in fields}
    for name, weight in weights.items():
        if weight not in (0, 1):
            raise _refused(f"{where}.{name}", weight, "0 or 1")
    if len({bool(weight) for weight in weights.values()}) > 1:
        raise _refused(where, weights, f"only one of {', '.join(LEARNED)}")
    return next(map(bool, weights.values()), None)


def _content(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise _refused(where, value, "a string or a list of text parts")
    texts: list[str] = []
    for number, part in enumerate(value):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        others = [name for name in part if name not in ("type", "text")] if isinstance(text, str) else []
        if not isinstance(text, str) or any(part[name] is not None for name in others):
            raise _refused(f"{where}[{number}]", part, 'an object with "type": "text" and text')
        texts.append(text)
    return "".join(texts)


def _reasoning(fields: Record, where: str) -> Record:
    texts = {name: text for name in REASONING if (text := _text(fields, name, where)) is not None}
    if len(set(texts.values())) > 1:
        raise _refused(where, texts, f"only one of {', '.join(REASONING)}")
    return {REASONING[0]: next(iter(texts.values()))} if texts else {}


def _from_sharegpt(fields: Record, where: str) -> Record:
    """Return the fields of a message of ShareGPT. A `function_call` has calls as JSON text in place of a text."""
    speaker, speakers = fields["from"], (*SHAREGPT_ROLES, *ROLES)
    if speaker not in speakers:
        raise _refused(f"{where}.from", speaker, f"one of {', '.join(speakers)}")
    if {"value", "content"} <= fields.keys():
        raise _refused(f"{where}.content", fields["content"], "only value beside from")
    said = fields.get("value", fields.get("content"))
    message = _without(fields, "from", "value") | {"role": SHAREGPT_ROLES.get(speaker, speaker), "content": said}
    if speaker == "function_call":
        calls = _from_json(said)
        message |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    return message


def _text(fields: Record, name: str, where: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _refused(f"{where}.{name}", value, "a string")
    return value


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and ("role" in item or {"from", "value"} <= item.keys())


def _tool(item: Any, where: str) -> Record:
    tool = _from_json(item)
    if isinstance(tool, Mapping) and "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": tool}
    tool = _object(tool, ("type", "function"), where)
    if tool.get("type") not in (None, "function"):
        raise _refused(f"{where}.type", tool["type"], '"function"')
    raw = tool.get("function")
    function = {key: value for key, value in raw.items() if value is not None} if isinstance(raw, Mapping) else {}
    if not isinstance(name := function.get("name"), str) or not name:
        raise _refused(f"{where}.function", raw, "an object with name and parameters")
    if "parameters" in function:
        function["parameters"] = _from_json(function["parameters"])
        if not isinstance(function["parameters"], Mapping):
            raise _refused(f"{where}.function.parameters", function["parameters"], "a JSON schema")
    if not isinstance(function.get("description", ""), str):
        raise _refused(f"{where}.function.description", function["description"], "a string")
    return {"type": "function", "function": function}


def _object(value: Any, names: Collection[str], where: str) -> Mapping[str, Any]:
    """Return an object that has no other fields than these. Raises DataError."""
    if not isinstance(value, Mapping):
        raise _refused(where, value, f"an object with {', '.join(names)}")
    for name, item in value.items():
        if name not in names and item is not None:
            raise _refused(f"{where}.{name}", item, f"one of these fields: {', '.join(names)}")
    return value


def _refused(where: str, value: Any, allowed: str) -> DataError:
    text = json.dumps(value, default=str)
    return DataError(f"{where} = {text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'}: allowed is {allowed}")


def _from_json(value: Any) -> Any:
    """Parse JSON text that is an object or a list. Return any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _check_text(value: Any, where: str) -> None:
    """Refuse half of a surrogate pair, which JSON may hold as an escape and no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: is no Unicode text: {error}") from error
    except RecursionError as error:
        raise DataError(f"{where}: is nested too deeply") from error


def _without(value: Mapping[str, Any], *names: str) -> Record:
    return {name: item for name, item in value.items() if name not in names}
