"""Error answers in the form that the client of a route expects."""

from typing import Any

from starlette.responses import JSONResponse

GENERATION = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET"}
"""The routes that clients of OpenAI call, with their methods."""
PROBES = frozenset({"/health", "/metrics", "/versions"})
"""Routes that change nothing, so that probes and scrapers need no token."""
ORDERS = frozenset(
    {"/pause", "/resume", "/is_paused", "/v1/pause", "/v1/resume", "/v1/is_paused", "/v1/abort_requests"}
)
"""The control routes."""
SESSIONS = "/sessions"
"""Below it lie the routes of each session, among them those that clients of OpenAI and Anthropic call."""
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
"""How the routes end that clients of Anthropic call."""
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
"""The type of an error with this HTTP status; "api_error" of any other."""


def error_answer(
    path: str, status: int, message: str, code: str | None = None, param: str | None = None
) -> JSONResponse:
    """In Anthropic's form on its routes, in OpenAI's on the other routes of generation and of sessions, in that of the
    control routes elsewhere. `code`: what a program tells errors by, else the status. `param`: the field it is about.
    """
    if path.endswith(ANTHROPIC):
        body = anthropic_error(status, message, code)
    elif path in GENERATION or path == "/v1/responses" or f"{path}/".startswith(f"{SESSIONS}/"):
        body = openai_error(status, message, code, param)
    else:
        body = {"error": message}
    return JSONResponse(body, status_code=status)


def openai_error(status: int, message: str, code: str | None, param: str | None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "slipstream"
    return {"error": {"message": message, "type": kind, "param": param, "code": status if code is None else code}}


def anthropic_error(status: int, message: str, code: str | None) -> dict[str, Any]:
    named = {} if code is None else {"code": code}
    return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(status, "api_error"), "message": message, **named}}
