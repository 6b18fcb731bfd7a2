"""The sessions that are open in one process, and the keys by which their harnesses speak in them."""

import contextlib
import hashlib
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers

from rollout.sessions.dialects.rule import LeftOutLog
from rollout.sessions.errors import (
    BadRequestError,
    ForbiddenError,
    InternalError,
    SessionEndedError,
    SessionError,
    UnknownKeyError,
    UnknownSessionError,
)
from rollout.sessions.session import Session
from rollout.sessions.tree.transcript import TranscriptClosedError

KEY_BYTES = 32
KEY_PREFIX = "session-"
"""The beginning of every key, so that the key of an ended session is still known as one of a session."""
_KEY = re.compile(rf"{KEY_PREFIX}[\w-]{{43}}", re.ASCII)  # 32 bytes in base64


@dataclass(slots=True)
class _KeyHolder:
    session: str
    may_steer: bool
    """True where the key rewards and aborts the session, too."""
    calls: set[str] = field(default_factory=set)
    """The idempotency keys that its client has sent."""


@dataclass(slots=True)
class SessionKeys:
    """Issues the keys of sessions. A key opens its own session, and no other, until `revoke`.

    Only digests are kept, so that the time of a look-up tells nothing about a key.
    """

    _holders: dict[bytes, _KeyHolder] = field(default_factory=dict)

    def issue(self, session: str, *, may_steer: bool = True) -> str:
        """Return a new key of the session. One that may not steer, since the policy may get hold of it, neither rewards
        nor aborts the session."""
        key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
        self._holders[_digest(key)] = _KeyHolder(session, may_steer)
        return key

    def revoke(self, session: str) -> None:
        """Forget the session's keys. A session that has none is left alone."""
        self._holders = {digest: holder for digest, holder in self._holders.items() if holder.session != session}

    def find_session(self, headers: Headers, path_session: str | None, *, steers: bool = False) -> str:
        """Return the session that a request is for. `path_session` is the one in its path, if it names one, and
        `steers` is true for a request that rewards or aborts it. Raises UnknownKeyError, UnknownSessionError for the
        path of another session, and ForbiddenError."""
        holder = self._find(headers)
        session = holder.session
        if path_session not in (None, session):
            raise UnknownSessionError(f"this key has no session {path_session[:80]!r}")
        if steers and not holder.may_steer:
            raise ForbiddenError(
                "this key is for the agent, which neither rewards nor aborts its session: rollout.reward scores the "
                "episode, or with sessions.command_reward=true the command does, by the key SLIPSTREAM_REWARD_KEY"
            )
        return session

    def is_retry(self, headers: Headers) -> bool:
        """Return whether the client says that it sends a request again. Call it once for a request, since it notes the
        request's idempotency key."""
        count = headers.get("x-stainless-retry-count", "0")  # set by the libraries of OpenAI and Anthropic
        is_retry = count.isascii() and count.isdigit() and int(count[:9]) > 0
        if (call := headers.get("idempotency-key")) is None:
            return is_retry
        calls = self._find(headers).calls
        is_retry = is_retry or call in calls
        calls.add(call)
        return is_retry

    def _find(self, headers: Headers) -> _KeyHolder:
        for key in _sent_keys(headers):
            if (holder := self._holders.get(_digest(key))) is not None:
                return holder
        where = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        raise UnknownKeyError(f"this needs the key of an open session as {where}: it ends when the session does")


def has_session_key(headers: Headers) -> bool:
    """Return whether the request brings the key of a session, open or not."""
    return any(_KEY.fullmatch(key) for key in _sent_keys(headers))


def _sent_keys(headers: Headers) -> Iterable[str]:
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            yield key.strip()
    yield from headers.getlist("x-api-key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward that a harness posts."""

    value: float
    answer_id: str | None = None
    """The answer that the reward is for; None is the whole session."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class OpenSessions(ABC):
    """Holds the sessions of one process for their HTTP app. Subclasses say who opens sessions and what becomes of them.

    Every method may raise a SessionError, which tells how it is answered.
    """

    def __init__(self, model: str):
        """`model` is the name of the policy for clients that list models. A request may name any other."""
        self.keys = SessionKeys()
        self.model = model
        self._sessions: dict[str, Session] = {}
        self._left_out = LeftOutLog()

    @abstractmethod
    async def create(self, task: Mapping[str, Any]) -> str:
        """Return the id of a new session: letters, digits, "-" and "_"."""

    def find(self, session: str) -> Session:
        """Return the session of this id. Raises SessionEndedError."""
        if (open_session := self._sessions.get(session)) is None:
            raise SessionEndedError(f"session {session[:80]} has ended")
        return open_session

    def refused(self, headers: Headers, error: SessionError) -> None:
        """Note that a request was refused, in the session whose key it has. A fault of ours is no refusal."""
        if error.status >= InternalError.status:
            return
        with contextlib.suppress(UnknownKeyError):
            session = self.keys.find_session(headers, None)
            if session in self._sessions:
                self._sessions[session].refused(error)

    def leave_out(self, session: Session, names: Sequence[str]) -> None:
        """Note fields of a request that are left out."""
        self._left_out.say(names)
        session.leave_out(names)

    async def reward(self, session: str, reward: Reward) -> None:
        try:
            self.find(session).transcript.reward(reward.value, reward.answer_id, reward.metrics)
        except TranscriptClosedError as error:
            raise SessionEndedError(str(error)) from None
        except ValueError as error:
            raise BadRequestError(str(error)) from None

    async def finish(self, session: str) -> None:
        self.find(session).close()

    async def abort(self, session: str) -> None:
        self.find(session).abort()

    async def transcript(self, session: str) -> Mapping[str, Any]:
        """Return the contents of the session so far as JSON, for people and harnesses."""
        open_session = self.find(session)
        names = open_session.transcript.names
        return {
            "session": names.session,
            "generations": [
                {
                    "id": names.answer_id(generation.number),
                    "parent": generation.parent,
                    "state": generation.state.name,
                    "cause": None if generation.cause is None else generation.cause.name,
                    "prompt_tokens": len(generation.prompt_ids),
                    "tokens": generation.completion.num_tokens,
                    "versions": [(span.start, span.end, span.global_steps) for span in generation.completion.spans],
                    "finish": None if generation.finish is None else generation.finish.name,
                    "answer": None if generation.answer is None else generation.answer.content,
                }
                for generation in open_session.transcript.generations
            ],
            "limit": open_session.budget.limit_reached,
            "ignored_fields": sorted(open_session.left_out),
        }
