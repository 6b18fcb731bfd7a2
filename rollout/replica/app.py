"""What a replica serves: the control routes, and behind them vLLM's OpenAI-compatible app."""

from starlette.types import ASGIApp

from rollout.http.auth import RequireToken
from rollout.http.control import Controlled, control_app


def replica_app(controlled: Controlled, openai_app: ASGIApp, token: str | None) -> ASGIApp:
    """Our /health and /metrics come before vLLM's. With a token everything but /health needs it: its only client is
    the gateway."""
    app = control_app(controlled, with_engine_metrics=True)
    app.mount("", openai_app)
    return app if token is None else RequireToken(app, token, {"/health"})
