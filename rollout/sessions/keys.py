"""The keys of the open sessions: whoever has one may speak in its session, and in no other."""

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from rollout.sessions.errors import UnknownKeyError, UnknownSessionError

KEY_BYTES = 32
PREFIX = "session-"
"""Of a key, so that one whose session has ended is still known as the key of a session."""
_KEY = re.compile(rf"{PREFIX}[\w-]{{43}}", re.ASCII)  # 32 bytes in base64


@dataclass(slots=True)
class _Open:
    session: str
    calls: set[str] = field(default_factory=set)
    """The idempotency keys that its client has sent."""


@dataclass(slots=True)
class SessionKeys:
    """A key is valid from `issue` to `revoke`. Only digests are kept: the time of a look-up tells nothing of a key."""

    _open: dict[bytes, _Open] = field(default_factory=dict)
    _digests: dict[str, bytes] = field(default_factory=dict)

    def issue(self, session: str) -> str:
        """Return the session's key. Raises ValueError when it has one."""
        if session in self._digests:
            raise ValueError(f"session {session!r} has a key already")
        key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
        self._digests[session] = _digest(key)
        self._open[_digest(key)] = _Open(session)
        return key

    def revoke(self, session: str) -> None:
        """After this the session's key is unknown. A session that has none is left alone."""
        if (digest := self._digests.pop(session, None)) is not None:
            del self._open[digest]

    def session_of(self, headers: Headers, path_session: str | None) -> str:
        """Return the session that a request is for. `path_session`: that of its path, if it has one. Raises
        UnknownKeyError, or UnknownSessionError for the path of another session."""
        session = self._find(headers).session
        if path_session not in (None, session):
            raise UnknownSessionError(f"this key has no session {path_session[:80]!r}")
        return session

    def is_retry(self, headers: Headers) -> bool:
        """Whether the client says that it sends a request again; asked once a request, as it notes the request."""
        count = headers.get("x-stainless-retry-count", "0")
        is_retry = count.isascii() and count.isdigit() and int(count[:9]) > 0
        if (call := headers.get("idempotency-key")) is None:
            return is_retry
        calls = self._find(headers).calls
        is_retry = is_retry or call in calls
        calls.add(call)
        return is_retry

    def _find(self, headers: Headers) -> _Open:
        for key in _given(headers):
            if (found := self._open.get(_digest(key))) is not None:
                return found
        where = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        raise UnknownKeyError(f"this needs the key of an open session as {where}: it ends when the session does")


def has_session_key(headers: Headers) -> bool:
    """Whether the request brings the key of a session, open or not."""
    return any(_KEY.fullmatch(key) for key in _given(headers))


def _given(headers: Headers) -> Iterable[str]:
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            yield key.strip()
    yield from headers.getlist("x-api-key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
