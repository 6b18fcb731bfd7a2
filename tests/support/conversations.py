"""A transcript with a harness, a renderer and a policy around it, all in one call of `ask`."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from rollout.chat.messages import ChatRequest, Finish, Message, Role, ToolCall
from rollout.chat.verification import Cause
from rollout.sessions.tree.attachment import Attachment
from rollout.sessions.tree.generation import Generation
from rollout.sessions.tree.transcript import Transcript
from rollout.types import Completion, VersionSpan

FIRST_SAMPLED = 100_000
"""Every sampled token has an id of its own from here on: a test sees where it went."""


def system(text: str) -> Message:
    return Message(role=Role.system, content=text)


def user(text: str) -> Message:
    return Message(role=Role.user, content=text)


def assistant(text: str, **fields: Any) -> Message:
    return Message(role=Role.assistant, content=text, **fields)


def result(call_id: str, text: str) -> Message:
    return Message(role=Role.tool, content=text, call_id=call_id)


def rendered(messages: Iterable[Message]) -> list[int]:
    """Return two tokens per message."""
    return [
        number for one in messages for number in (list(Role).index(one.role), zlib.crc32(one.content.encode()) % 99)
    ]


class Conversations:
    """One session, which with `bridges` goes on from the parent's tokens after an edit too."""

    def __init__(self, session: str = "a", bridges: bool = True):
        self.transcript = Transcript(session)
        self.bridges = bridges
        self._tokens = count(FIRST_SAMPLED)

    def attach(self, *messages: Message, **request: Any) -> Attachment:
        return self.transcript.attach(ChatRequest(messages=messages, **request))

    def begin(self, *messages: Message, **request: Any) -> tuple[Generation, ...]:
        """Begin generations, and set their prompt."""
        attachment = self.attach(*messages, **request)
        prompt = self.render(attachment)
        return tuple(self.transcript.set_prompt(one.number, prompt) for one in self.transcript.begin(attachment))

    def render(self, attachment: Attachment) -> list[int]:
        fits = attachment.cause in (None, Cause.retry) or self.bridges
        if attachment.parent is not None and attachment.can_bridge and fits:
            parent = self.transcript.generation(attachment.parent)
            return [*parent.token_ids.tolist(), *rendered(attachment.messages)]
        return rendered(attachment.conversation)

    def completion(self, versions: Sequence[int]) -> Completion:
        """Return one token per version, with logprobs that say which token it is."""
        ids = np.array([next(self._tokens) for _ in versions], np.int32)
        spans = tuple(VersionSpan(at, at + 1, version) for at, version in enumerate(versions))
        return Completion(token_ids=ids, logprobs=-ids.astype(np.float32), spans=spans, finish_reason="stop")

    def finish(self, number: int, text: str, calls: Sequence[str] = (), **fields: Any) -> Generation:
        """Finish a generation; `calls` are the arguments of its calls of the tool "calculator"."""
        versions, finish = fields.pop("versions", (1, 1, 2)), fields.pop("finish", Finish.stop)
        names = self.transcript.names
        tool_calls = tuple(
            ToolCall(call_id=names.call_id(number, at), name="calculator", arguments=arguments)
            for at, arguments in enumerate(calls)
        )
        message = assistant(text, tool_calls=tool_calls, **fields)
        return self.transcript.finish(number, self.completion(versions), message, finish)

    def ask(self, *messages: Message, text: str = "", whole: bool = True, **fields: Any) -> Generation:
        """Ask for one answer, up to its delivery. It has a text of its own unless one is set."""
        asked = {name: fields.pop(name) for name in list(fields) if name in ChatRequest.__dataclass_fields__}
        (one,) = self.begin(*messages, **asked)
        self.finish(one.number, text or f"answer {one.number}", **fields)
        return self.transcript.deliver(one.number, whole=whole)


def said(one: Generation) -> Message:
    """Return the answer, as a harness that keeps everything sends it back."""
    assert one.answer is not None
    return one.answer


def anonymous(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages with other ids of tool calls, and without signatures."""
    names: dict[str, str] = {}

    def other(name: str) -> str:
        return names.setdefault(name, f"tool_{len(names)}")

    return tuple(
        replace(
            message,
            signature=None,
            call_id=None if message.call_id is None else other(message.call_id),
            tool_calls=tuple(replace(call, call_id=other(call.call_id)) for call in message.tool_calls),
        )
        for message in messages
    )


def sampled(sequences: Iterable[Any]) -> list[int]:
    """Return the token ids under the loss masks."""
    return [number for one in sequences for number in one.response_ids[one.loss_mask].tolist()]
