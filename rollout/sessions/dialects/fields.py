"""Reading of JSON objects field by field, with an error for every field that nobody has read."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollout.chat.messages import ToolSpec
from rollout.sessions.dialects.rule import LeftOut, misspelled
from rollout.sessions.errors import BadRequestError

MAX_SHOWN = 80
"""The characters of a value that an error repeats."""
MAX_LABEL = 200
"""The characters of a title or a name that the note in place of a document may have."""
LABELS = ("title", "filename", "file_name", "tool_name", "name", "uri")
"""Fields that name what is not shown."""
PARSED, PARSED_ARGUMENTS = "parsed", "parsed_arguments"
"""Fields that OpenAI's library adds to an answer and sends back: its content once more, as Python objects."""


class Fields:
    """One JSON object of a request. Every field is taken once, and null counts as a field that is not there.

    `end` refuses fields that were not taken, or leaves them out by the rule of `rollout/sessions/dialects/rule.py`: a
    field that is overlooked could change what is sampled, and nobody would see it. All methods raise BadRequestError,
    which names the field, its value and the allowed ones.
    """

    def __init__(self, value: Any, where: str = "", left_out: LeftOut | None = None):
        """`left_out` takes the fields that are left out; without it they are refused, as in a reward."""
        self.where = where
        self.left_out = left_out
        if not isinstance(value, Mapping):
            raise BadRequestError(f"{where or 'the body'} = {shown(value)}: allowed is an object", param=where or None)
        self._values = {name: item for name, item in value.items() if item is not None}
        self._known: list[str] = []

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def refuse(self, name: str, value: Any, allowed: str) -> BadRequestError:
        return BadRequestError(f"{self.path(name)} = {shown(value)}: allowed is {allowed}", param=self.path(name))

    def within(self, value: Any, path: str) -> "Fields":
        """Return an object inside this one."""
        return Fields(value, path, self.left_out)

    def holds(self, name: str) -> bool:
        """Return whether a field is there and was not taken."""
        return name in self._values

    def take(self, name: str) -> Any:
        self._known.append(name)
        return self._values.pop(name, None)

    def text(self, name: str, default: str | None = None) -> str | None:
        if (value := self.take(name)) is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, value, "a string")
        return value

    def must_have_text(self, name: str) -> str:
        if (value := self.text(name)) is None:
            raise self.refuse(name, None, "a string")
        return value

    def integer(self, name: str, minimum: int, maximum: int = 2**31 - 1) -> int | None:
        value = self.take(name)
        if value is not None and (type(value) is not int or not minimum <= value <= maximum):
            raise self.refuse(name, value, f"an integer from {minimum} to {maximum}")
        return value

    def numbers(self, *names: str) -> dict[str, float]:
        """Return the fields that are present, as finite numbers."""
        numbers = {name: value for name in names if (value := self.take(name)) is not None}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
                raise self.refuse(name, value, "a finite number")
        return numbers

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, value, "true or false")
        return default if value is None else value

    def choice(self, name: str, allowed: Collection[str], default: str) -> str:
        value = self.text(name, default)
        if value not in allowed:
            raise self.refuse(name, value, "one of " + ", ".join(json.dumps(word) for word in allowed))
        assert value is not None
        return value

    def object(self, name: str) -> "Fields | None":
        value = self.take(name)
        return None if value is None else self.within(value, self.path(name))

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object whose fields are not ours to read."""
        value = self.take(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(name, value, "an object")
        return value or {}

    def must_have_object(self, name: str, allowed: str) -> "Fields":
        if (inner := self.object(name)) is None:
            raise self.refuse(name, None, allowed)
        return inner

    def items(self, name: str) -> Iterator["Fields"]:
        """Yield the objects of a list."""
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise self.refuse(name, value, "a list of objects")
        yield from self.each(name, value or ())

    def each(self, name: str, values: Iterable[Any]) -> Iterator["Fields"]:
        """Yield the objects of a list that was taken."""
        for index, value in enumerate(values):
            yield self.within(value, f"{self.path(name)}[{index}]")

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the texts of a string or a list of strings. An empty one would end every answer at once."""
        value = self.take(name)
        values = [value] if isinstance(value, str) else value
        if values is None:
            return ()
        if not isinstance(values, list) or not all(isinstance(text, str) and text for text in values):
            raise self.refuse(name, value, "a string or a list of strings, none of them empty")
        return tuple(values)

    def only(self, name: str, *allowed: Any) -> None:
        """Take a field of which only these values, which change nothing, are supported."""
        known = self._known_fields()
        value = self.take(name)
        if value is not None and not _is_among(value, allowed):
            raise self.refuse(name, value, "only " + " or ".join(["null", *map(shown, allowed)]) if allowed else known)

    def ignore(self, *names: str) -> None:
        """Take fields that change nothing of the answer."""
        for name in names:
            self.take(name)

    def hint(self, name: str, *neutral: Any) -> None:
        """Take a field and leave it out, unless it has one of these values, which ask for nothing."""
        value = self.take(name)
        if self.left_out is not None and value is not None and not _is_among(value, neutral):
            self.left_out.add(self.path(name))

    def leave_out(self, name: str, kind: str, value: Any) -> None:
        """Note that a field is left out because it is of a kind that nothing can be made of. Without anybody who counts
        that, it is refused."""
        if self.left_out is None:
            raise self.refuse(name, value, "text and functions only")
        self.left_out.add(self.path(name), kind)

    def drop(self) -> None:
        """Take all fields, of an object that is left out as a whole."""
        self._values = {}

    def end(self) -> None:
        """Refuse a field that nobody has taken, or leave it out if it is not a known one that is misspelled."""
        for name, value in self._values.items():
            if self.left_out is None or misspelled(name, self._known) is not None:
                raise self.refuse(name, value, self._known_fields())
            self.left_out.add(self.path(name))

    def _known_fields(self) -> str:
        return f"one of these fields{f' in {self.where}' if self.where else ''}: {', '.join(sorted(self._known))}"


def _is_among(value: Any, allowed: Collection[Any]) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in allowed)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def shown(value: Any) -> str:
    """Return a value as JSON in ASCII, cut off where it is long."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def joined_text(
    fields: Fields,
    name: str,
    kinds: Sequence[str] = ("text",),
    without: str | None = None,
    has_notes: bool = False,
) -> str:
    """Return a string, or the joined parts of a list, without parts that begin with `without`. Parts of other types
    than `kinds`, such as images, audio and files, are refused. With `has_notes` a text that names them is put in their
    place, and they are left out: a tool has brought them, so a policy that looks at an image can go on."""
    value = fields.take(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise fields.refuse(name, value, "a string or a list of text parts")
    texts = [_part(part, kinds, has_notes) for part in fields.each(name, value)]
    return "".join(text for text in texts if without is None or not text.startswith(without))


def _part(part: Fields, kinds: Sequence[str], has_notes: bool) -> str:
    kind = part.text("type") or ""
    if kind not in kinds and has_notes and kind:
        return note(part, kind)
    if kind not in kinds:
        raise part.refuse("type", kind, "one of " + ", ".join(json.dumps(word) for word in kinds))
    text = part.must_have_text("text")
    part.ignore("cache_control", "prompt_cache_breakpoint", "citations", "annotations", "logprobs", PARSED)
    part.end()
    return text


def note(part: Fields, kind: str) -> str:
    """Return the text in place of something that a tool has brought and that is no text, and leave that out. The note
    has what can be read of it: names, and the text of documents and of results of a search."""
    part.leave_out("type", kind, kind)
    names = [part.take(name) for name in LABELS]
    source = part.take("source")
    label = ", ".join([kind, *(name for name in (*names, source) if isinstance(name, str) and _is_label(name))])
    texts = [*_inner_texts(part.take("content")), *_inner_texts(source)]
    part.drop()
    return "\n".join([f"[{label}]" if texts else f"[{label}: not shown, because this model reads text only]", *texts])


def _is_label(text: str) -> bool:
    return 0 < len(text) <= MAX_LABEL and not text.startswith("data:")


def _inner_texts(value: Any) -> list[str]:
    """Return the texts of what a part contains."""
    if isinstance(value, list):
        return [text for item in value for text in _inner_texts(item)]
    if not isinstance(value, Mapping):
        return []
    if value.get("type") == "text":
        texts = (value.get("text"), value.get("data"))
        return [text for text in texts if isinstance(text, str)]
    return _inner_texts(value.get("content"))


def tool_spec(fields: Fields, schema: str = "parameters") -> ToolSpec:
    """Return a tool. "strict" is a hint, since arguments are sampled freely."""
    spec = ToolSpec(
        name=fields.must_have_text("name"),
        description=fields.text("description") or "",
        parameters=fields.mapping(schema),
    )
    fields.hint("strict", False)
    fields.ignore("cache_control")
    fields.end()
    return spec
