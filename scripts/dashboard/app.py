"""Serve the page over HTTP: its files and its routes, on a loopback address. The first part of the path is a token.

Everything that comes out of a run folder leaves as JSON in ASCII, and the page sets it as text. A strict content
security policy forbids scripts, styles and connections from elsewhere.
"""

import hmac
import inspect
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scripts.dashboard.routes import Routes
from scripts.observe.files import RunError

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class TokenInPath:
    """ASGI middleware that answers only paths that begin with the token, and puts HEADERS on every answer."""

    def __init__(self, app: ASGIApp, token: str):
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"unexpected scope {scope['type']}")

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        token, slash, rest = scope["path"].removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode(), self._token.encode()):
            answer = PlainTextResponse("this needs the address that the dashboard has printed", 404)
            return await answer(scope, receive, send_guarded)
        path = "/" + rest
        await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send_guarded)


def to_json(data: Any) -> str:
    """Return JSON in ASCII, so that no character of a run breaks it, with < escaped for HTML."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def json_answer(data: Any, status: int = 200) -> Response:
    return Response(to_json(data), status, media_type="application/json")


def dashboard_app(routes: Routes) -> FastAPI:
    """Return the application without the token. Its routes are no coroutines: they read files, in threads."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RunError)
    async def refuse(request: Request, error: RunError) -> Response:
        return json_answer({"error": str(error)}, 404)

    @app.exception_handler(OSError)
    async def unreadable(request: Request, error: OSError) -> Response:
        return json_answer({"error": f"cannot be read: {error}"}, 404)

    @app.get("/")
    def index() -> Response:
        return static("index.html")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        files = {path.name: path for path in STATIC.iterdir() if path.suffix in TYPES}
        if name not in files:
            raise RunError(f"{name}: no such file")
        return Response(files[name].read_bytes(), media_type=TYPES[files[name].suffix])

    _add_routes(app, routes)
    return app


def _add_routes(app: FastAPI, routes: Routes) -> None:
    """Add a route for each answer, with its arguments as the query and the name of the run in the place of the run."""
    lock = threading.Lock()  # each answer is made in a thread of its own, and they share what was read

    @app.get("/api/runs")
    def runs() -> Response:
        return json_answer(routes.runs())

    def add(route: str, answer: Callable[..., Any]) -> None:
        def respond(**query: Any) -> Response:
            with lock:
                return json_answer(routes.answer(route, **query))

        run, *others = inspect.signature(answer).parameters.values()
        respond.__signature__ = inspect.Signature([run.replace(annotation=str), *others])  # type: ignore[attr-defined]
        app.get(f"/api/{route}", response_model=None)(respond)

    for route, answer in routes.answers.items():
        add(route, answer)
