"""Sessions and the gateway behind one address: which of them a request is for, and which token it needs."""

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.http.access import Access
from rollout.http.answers import ANTHROPIC, GENERATION, SESSIONS
from rollout.sessions.keys import has_session_key

ONLY_IN_SESSIONS = (*ANTHROPIC, "/v1/responses")
"""Routes of dialects that the gateway does not pass on to replicas."""


def is_for_session(path: str, headers: Headers) -> bool:
    """Both sides have the routes of generation: there a request is for a session if it brings the key of one. A key
    whose session has ended is a key nevertheless, so that nothing is answered that nobody records."""
    if f"{path}/".startswith(f"{SESSIONS}/") or path in ONLY_IN_SESSIONS:
        return True
    return path in GENERATION and has_session_key(headers)


class SessionGatewayAccess(Access):
    """To open a session takes the server's token. The rest of a session takes its key, which the app of sessions asks
    for; everything else what it takes without sessions."""

    __slots__ = ()

    def admits(self, path: str, headers: Headers) -> bool:
        if path.rstrip("/") == SESSIONS:
            return self.token is None or self._has_token(headers)
        return is_for_session(path, headers) or super().admits(path, headers)


@dataclass(frozen=True, slots=True)
class SessionGateway:
    """ASGI app."""

    sessions: ASGIApp
    gateway: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.sessions if is_for_session(scope["path"], Headers(scope=scope)) else self.gateway
        await app(scope, receive, send)
