"""What an HTTP dialect is: JSON to a request, and answers to JSON or to server-sent events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.sessions.backend import PromptRequest
from rollout.sessions.errors import SessionError
from rollout.sessions.messages import Answer, ChatRequest, Finish

COMMENT = b": keepalive\n\n"
"""An event stream's way to say nothing: clients skip it."""
CUT_SHORT = (Finish.length, Finish.abort)
"""Answers that are not whole. No dialect has a word for an abort that every client knows, so that is a "length"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, and what of its body the form of the answer depends on."""

    request: ChatRequest | PromptRequest
    model: str
    """As the client calls the policy: the answer repeats it."""
    created: int
    """Unix time in seconds."""
    is_stream: bool = False
    with_usage: bool = False
    """Whether the stream ends with the usage, where the client decides that."""
    echoed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the answer repeats."""


class Dialect(Protocol):
    keepalive: bytes
    """What a stream sends while its answer is being generated."""

    def parse(self, body: Any, created: int) -> Asked:
        """Raises BadRequestError."""
        ...

    def body(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
        """At least one answer, all to the same prompt."""
        ...

    def events(self, asked: Asked, answers: Sequence[Answer]) -> Iterator[bytes]:
        """The whole stream, in the dialect's order."""
        ...

    def error_event(self, error: SessionError) -> bytes:
        """An error in a stream that has begun, after which it ends."""
        ...


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode() if name is not None else f"data: {text}\n\n".encode()


def num_prompt_tokens(answers: Sequence[Answer]) -> int:
    return len(answers[0].prompt_ids)


def num_sampled_tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.completion.num_tokens for answer in answers)


def id_without(prefix: str, given: str | None) -> str | None:
    """The id of a generation, if an id that a harness sends back is one of ours."""
    return given.removeprefix(prefix) if given is not None and given.startswith(prefix) else None
