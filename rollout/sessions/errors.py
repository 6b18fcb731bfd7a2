"""Errors that a harness is told about, each with an HTTP status and a code that stays the same."""

from typing import Any


class SessionError(Exception):
    """The base of these errors. `message` is for people and `code` for programs; `param` names the field of the request
    that is wrong."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.code = self.code if code is None else code
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,), {"code": self.code, "param": self.param}


class BadRequestError(SessionError):
    """The request cannot be answered as it is."""


class UnknownKeyError(SessionError):
    """The request has no key, or one of no open session."""

    status = 401
    code = "invalid_api_key"


class UnknownSessionError(SessionError):
    """The key is not that of the session in the path."""

    status = 404
    code = "session_not_found"


class ForbiddenError(SessionError):
    """The key is that of an agent, which must not steer its own training."""

    status = 403
    code = "forbidden"


class NotStoredError(SessionError):
    """The session has no such answer to give again."""

    status = 404
    code = "response_not_found"


class SessionEndedError(SessionError):
    """The session was finished or aborted while the request was under way."""

    status = 403
    code = "session_ended"


class SessionLimitError(SessionError):
    """The session has reached a limit, and has already had an answer that ends with "length".

    Example: SessionLimitError("the session has had 64 turns (max_turns=64)", code="max_turns")
    """

    status = 403
    code = "session_limit"


class TooManySessionsError(SessionError):
    """No more sessions may be open at once."""

    status = 429
    code = "too_many_sessions"


class NoReplicaError(SessionError):
    """No replica is in service, or the server is about to end."""

    status = 503
    code = "no_replica"


class NotRecordedError(SessionError):
    """The record of a session cannot be written."""

    status = 500
    code = "not_recorded"


class InternalError(SessionError):
    """Answering failed. The client is not told why; the log of the server says it."""

    status = 500
    code = "internal_error"
