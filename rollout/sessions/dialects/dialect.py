"""The base of the HTTP dialects: JSON becomes a request, and answers become JSON or server-sent events."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rollout.chat.messages import Answer, ChatRequest, Finish
from rollout.http.answers import openai_error
from rollout.sessions.dialects.fields import Fields
from rollout.sessions.dialects.rule import BOOKKEEPING, HINTS, REFUSED, LeftOut
from rollout.sessions.dialects.tools import Offers
from rollout.sessions.errors import SessionError

Recorded = Callable[[str], Answer | None]
"""(the id of an answer) -> the answer, if its session has given it."""
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
COMMENT = b": keepalive\n\n"
"""An empty message of an event stream, which clients skip."""
CUT_SHORT = (Finish.length, Finish.abort)

"""The ends of answers that are not whole. No dialect has a word for an abort that every client knows, so it is told as
a "length"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request, and the fields of its body that decide about the form of the answer."""

    request: ChatRequest
    model: str = ""
    """The client's name of the policy, which the answer repeats."""
    created: int = 0
    """Unix time in seconds."""
    is_stream: bool = False
    with_usage: bool = False
    """True if the stream ends with the usage, where the client decides that."""
    echoed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the answer repeats."""
    offers: Offers = field(default_factory=dict)
    is_stored: bool = False
    """True if the client may ask for the answer again by its id."""
    left_out: tuple[str, ...] = ()
    """The fields that were left out by the rule of `rollout/sessions/dialects/rule.py`."""


class Dialect(ABC):
    prefix: ClassVar[str]
    """The beginning of the `id` of an answer, which the id of its generation follows."""
    keepalive: ClassVar[bytes] = COMMENT
    """The bytes that a stream sends while its answer is being generated."""

    def parse(self, body: Any, created: int, recorded: Recorded = lambda _: None) -> ParsedRequest:
        """Return the request in the body of a call. Raises BadRequestError.

        Args:
            recorded: looks up an answer of the session, to which a request may refer by its id.
        """
        left_out = LeftOut()
        fields = Fields(body, left_out=left_out)
        model = fields.must_have_text("model")
        parsed = self.read(fields, recorded)
        end_by_rule(fields)
        return replace(parsed, model=model, created=created, left_out=left_out.names)

    @abstractmethod
    def read(self, fields: Fields, recorded: Recorded) -> ParsedRequest:
        """Read the fields of this dialect that decide about the answer, for `end_by_rule` to end the others. Raises
        BadRequestError."""

    @abstractmethod
    def body(self, parsed: ParsedRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body for one or more answers to the same prompt."""

    @abstractmethod
    def events(self, parsed: ParsedRequest, answers: Sequence[Answer]) -> Iterator[bytes]:
        """Yield the whole stream, in the dialect's order."""

    def error_event(self, error: SessionError) -> bytes:
        """Return an error of a stream that has begun, after which the stream ends."""
        return event(openai_error(error.status, error.message, error.code, error.param))


def end_by_rule(fields: Fields) -> None:
    """Refuse or leave out the fields of a request that its dialect has not read."""
    for name, neutral in REFUSED.items():
        if fields.holds(name):
            fields.only(name, *neutral)
    for name, neutral in HINTS.items():
        if fields.holds(name):
            fields.hint(name, *neutral)
    fields.ignore(*filter(fields.holds, BOOKKEEPING))
    fields.end()


def template_options(fields: Fields) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets, under whatever name: they change what the policy
    reads."""
    options: dict[str, Any] = {}
    if (thinking := fields.object("thinking")) is not None:
        kind = thinking.choice("type", ("enabled", "disabled", "adaptive", "auto"), "")
        thinking.hint("budget_tokens")
        thinking.ignore("display")
        thinking.end()
        options |= {"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else {}
    if (reasoning := fields.object("reasoning")) is not None:
        options |= _words(reasoning, effort="reasoning_effort") | _flags(reasoning, enabled="enable_thinking")
        reasoning.hint("max_tokens")
        reasoning.ignore("summary", "generate_summary", "context", "mode", "exclude")
        reasoning.end()
    options |= _words(fields, reasoning_effort="reasoning_effort") | _flags(fields, enable_thinking="enable_thinking")
    fields.hint("thinking_budget")
    return {**options, **fields.mapping("chat_template_kwargs")}


def _words(fields: Fields, **names: str) -> dict[str, str]:
    return {option: word for name, option in names.items() if (word := fields.text(name)) is not None}


def _flags(fields: Fields, **names: str) -> dict[str, bool]:
    return {option: fields.flag(name) for name, option in names.items() if fields.holds(name)}


def text_format(fields: Fields, name: str) -> None:
    """Take the form of an answer's text. Answers are sampled freely, so a schema is refused, except where the request
    says that it need not hold."""
    value = fields.take(name)
    if value is None or value == {"type": "text"}:
        return
    schema = value.get("json_schema", value) if isinstance(value, Mapping) else None
    if isinstance(schema, Mapping) and schema.get("strict") is False and value.get("type") == "json_schema":
        fields.leave_out(name, "json_schema that is not strict", value)
        return
    raise fields.refuse(name, value, 'only null or {"type": "text"}, because answers are sampled freely')


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return one server-sent event."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode() if name is not None else f"data: {text}\n\n".encode()


def num_sampled_tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.completion.num_tokens for answer in answers)


def id_without(prefix: str, client_id: str | None) -> str | None:
    """Return the id of a generation, if an id that a harness sends back begins with our prefix."""
    return client_id.removeprefix(prefix) if client_id is not None and client_id.startswith(prefix) else None
