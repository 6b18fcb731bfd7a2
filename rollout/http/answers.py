"""Error answers in the form that the client of a route expects."""

from starlette.responses import JSONResponse

GENERATION = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET"}
"""The routes that clients of OpenAI call, with their methods."""
PROBES = frozenset({"/health", "/metrics", "/versions"})
"""Routes that change nothing, so that probes and scrapers need no token."""
ORDERS = frozenset(
    {"/pause", "/resume", "/is_paused", "/v1/pause", "/v1/resume", "/v1/is_paused", "/v1/abort_requests"}
)
"""The control routes."""


def error_answer(path: str, status: int, message: str) -> JSONResponse:
    """In OpenAI's form on the routes of generation, in that of the control routes elsewhere."""
    if path not in GENERATION:
        return JSONResponse({"error": message}, status_code=status)
    kind = "invalid_request_error" if status < 500 else "slipstream"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status_code=status
    )
