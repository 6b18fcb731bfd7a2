"""Error answers in the form that the client of a route expects."""

from typing import Any

from starlette.responses import JSONResponse

GENERATION = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET"}
"""The routes that clients of OpenAI call, with their methods."""
PROBES = frozenset({"/health", "/metrics", "/versions"})
"""The routes for probes and scrapers, which need no token because they change nothing."""
ORDERS = frozenset(
    {"/pause", "/resume", "/is_paused", "/v1/pause", "/v1/resume", "/v1/is_paused", "/v1/abort_requests"}
)
"""The control routes."""
SESSIONS = "/sessions"
"""The route below which those of each session lie, among them the ones that clients of OpenAI and Anthropic call."""
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
"""The ends of the routes that clients of Anthropic call."""
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
    """Return an error in the form of its route: Anthropic's on its own, OpenAI's on the other routes of generation and
    sessions, and that of the control routes elsewhere. `code` is for programs, and the status by default; `param` is
    the field that is wrong."""
    if path.endswith(ANTHROPIC):
        body = anthropic_error(status, message, code)
    elif path in GENERATION or f"{path}/".startswith(("/v1/responses/", "/v1/models/", f"{SESSIONS}/")):
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
