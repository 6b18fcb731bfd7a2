"""The HTTP app of sessions: a harness opens one, talks to the policy in the dialect of its client, and ends it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.http.access import Access
from rollout.http.answers import ANTHROPIC, GENERATION, SESSIONS, error_answer
from rollout.sessions.dialects.anthropic import AnthropicMessages, parse_count
from rollout.sessions.dialects.dialect import Dialect, id_without
from rollout.sessions.dialects.fields import Fields
from rollout.sessions.dialects.openai import OpenAIChat, OpenAICompletions
from rollout.sessions.dialects.responses import OpenAIResponses, parse_input
from rollout.sessions.endpoint import KEEPALIVE_S, DialectEndpoint, json_body, parse_body, refusal
from rollout.sessions.errors import BadRequestError, NotStoredError, SessionError
from rollout.sessions.registry import OpenSessions, Reward, has_session_key

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": OpenAIChat(),
    "/v1/completions": OpenAICompletions(),
    "/v1/responses": OpenAIResponses(),
    "/v1/messages": AnthropicMessages(),
}
RESPONSES, MODELS = "/v1/responses", "/v1/models"
ONLY_IN_SESSIONS = ("/", *ANTHROPIC)
"""Routes that the gateway does not pass on to replicas: those of dialects, and the root, where clients look whether a
server is there."""


def session_app(sessions: OpenSessions, keepalive_s: float = KEEPALIVE_S) -> Starlette:
    """Return the app, which `rollout.http.server.served` serves.

    The routes of the dialects are below each session, for harnesses that take a base URL, and at the top, for harnesses
    whose path is fixed: there the key alone tells the session. Whoever opens or ends a session without HTTP issues and
    revokes its key in `sessions.keys`.
    """
    api = _SessionRoutes(sessions)
    routes = [
        Route(SESSIONS, api.create, methods=["POST"]),
        Route(f"{SESSIONS}/{{session}}", api.transcript, methods=["GET"]),
        Route(f"{SESSIONS}/{{session}}/reward", api.reward, methods=["POST"]),
        Route(f"{SESSIONS}/{{session}}/finish", api.ending(sessions.finish), methods=["POST"]),
        Route(f"{SESSIONS}/{{session}}/abort", api.ending(sessions.abort, steers=True), methods=["POST"]),
    ]
    for place in ("/", f"{SESSIONS}/{{session}}", f"{SESSIONS}/{{session}}/"):
        routes.insert(0, Route(place, _is_there, methods=["HEAD"]))  # before GET, which answers HEAD too
    for prefix in (f"{SESSIONS}/{{session}}", ""):
        for path, dialect in DIALECTS.items():
            endpoint = DialectEndpoint(sessions=sessions, dialect=dialect, keepalive_s=keepalive_s)
            routes.append(Route(prefix + path, endpoint, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/messages/count_tokens", api.count_tokens, methods=["POST"]))
        routes.append(Route(f"{prefix}{RESPONSES}/input_tokens", api.input_tokens, methods=["POST"]))
        routes.append(Route(f"{prefix}{RESPONSES}/{{response}}", api.response, methods=["GET"]))
        routes.append(Route(f"{prefix}{MODELS}", api.models, methods=["GET"]))
        routes.append(Route(f"{prefix}{MODELS}/{{model:path}}", api.model, methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={SessionError: api.refuse, HTTPException: api.no_route})
    app.router.redirect_slashes = False
    return app


class _SessionRoutes:
    """The routes that generate nothing."""

    def __init__(self, sessions: OpenSessions):
        self._sessions = sessions

    async def create(self, request: Request) -> Response:
        """Open a session. The body is the task, whose fields are between the harness and its reward."""
        task = await json_body(request)
        if not isinstance(task, dict):
            raise BadRequestError("the body must be an object, the fields of the task")
        session = await self._sessions.create(task)
        key = self._sessions.keys.issue(session)
        base_url = f"{request.base_url}{SESSIONS[1:]}/{session}"
        return JSONResponse({"id": session, "key": key, "base_url": base_url}, status_code=201)

    async def transcript(self, request: Request) -> Response:
        return JSONResponse(await self._sessions.transcript(self._find_session(request)))

    async def reward(self, request: Request) -> Response:
        session = self._find_session(request, steers=True)
        await self._sessions.reward(session, parse_body(read_reward, await json_body(request)))
        return JSONResponse({"id": session})

    def ending(
        self, end: Callable[[str], Awaitable[None]], *, steers: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a route that ends a session."""

        async def route(request: Request) -> Response:
            session = self._find_session(request, steers=steers)
            await end(session)
            self._sessions.keys.revoke(session)
            return JSONResponse({"id": session})

        return route

    async def count_tokens(self, request: Request) -> Response:
        session = self._sessions.find(self._find_session(request))
        counted = parse_body(parse_count, await json_body(request))
        return JSONResponse({"input_tokens": await session.count_tokens(counted)})

    async def input_tokens(self, request: Request) -> Response:
        session = self._sessions.find(self._find_session(request))
        counted = parse_body(parse_input, await json_body(request), session.recorded)
        number = await session.count_tokens(counted)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": number})

    async def response(self, request: Request) -> Response:
        """Return a response that the session has given, unless its request had `store` false."""
        session, name = self._sessions.find(self._find_session(request)), request.path_params["response"]
        dialect = DIALECTS[RESPONSES]
        stored = session.stored(id_without(dialect.prefix, name) or "")
        if stored is None:
            message = f"response {ascii(name)[:80]}: must be the id of a response that this session has given"
            raise NotStoredError(f"{message} and stored")
        parsed, answer = stored
        return JSONResponse(dialect.body(parsed, [answer]))

    async def models(self, request: Request) -> Response:
        """Return one list that clients of OpenAI and of Anthropic can read."""
        self._find_session(request)
        name = self._sessions.model
        models = [_model(name)]
        return JSONResponse({"object": "list", "data": models, "has_more": False, "first_id": name, "last_id": name})

    async def model(self, request: Request) -> Response:
        """Return a model of any name, because the policy answers by every name."""
        self._find_session(request)
        return JSONResponse(_model(request.path_params["model"]))

    async def refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, SessionError)
        self._sessions.refused(request.headers, error)
        return refusal(request.scope["path"], error)

    async def no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        message = f"{request.method} {ascii(path)}: {error.detail}"
        self._sessions.refused(request.headers, BadRequestError(message))
        return error_answer(path, error.status_code, message)

    def _find_session(self, request: Request, *, steers: bool = False) -> str:
        return self._sessions.keys.find_session(request.headers, request.path_params.get("session"), steers=steers)


def _model(name: str) -> dict[str, Any]:
    model = {"id": name, "display_name": name, "owned_by": "slipstream", "object": "model", "type": "model"}
    return model | {"created": 0, "created_at": "1970-01-01T00:00:00Z"}


async def _is_there(request: Request) -> Response:
    """Answer a client that looks whether a server is there, before it has a key. It learns nothing of sessions."""
    return Response()


def read_reward(body: Any) -> Reward:
    """Return a posted reward, such as {"value": 1.0, "turn": "chatcmpl-...", "metrics": {"steps": 3}}. `turn` is the id
    of an answer as the client got it, or without its prefix. Raises BadRequestError."""
    fields = Fields(body)
    values, answer_id, metrics = fields.numbers("value"), fields.text("turn"), fields.mapping("metrics")
    if not values:
        raise fields.refuse("value", None, "a finite number")
    fields.end()
    ids = (id_without(dialect.prefix, answer_id) for dialect in DIALECTS.values())
    numbers = Fields(metrics, "metrics").numbers(*metrics)
    return Reward(value=values["value"], answer_id=next(filter(None, ids), answer_id), metrics=numbers)


# -- beside a gateway --------------------------------------------------------------------------------------------------


def is_for_session(path: str, headers: Headers) -> bool:
    """Return whether a request is for the app of sessions. Sessions and the gateway both have the routes of generation:
    there a request with the key of a session is for sessions. The key of an ended session counts too, so that nothing
    is answered that nobody records."""
    if f"{path}/".startswith((f"{SESSIONS}/", f"{RESPONSES}/")) or path in ONLY_IN_SESSIONS:
        return True
    return (path in GENERATION or path.startswith(f"{MODELS}/")) and has_session_key(headers)


class SessionGatewayAccess(Access):
    """Asks for the server's token to open a session. All else of a session takes its key, which the app of sessions
    asks for, and other routes take what they take without sessions."""

    __slots__ = ()

    def admits(self, path: str, headers: Headers) -> bool:
        if path.rstrip("/") == SESSIONS:
            return self.token is None or self._has_token(headers)
        return is_for_session(path, headers) or super().admits(path, headers)


@dataclass(frozen=True, slots=True)
class SessionGateway:
    """ASGI app that passes requests on to the app of sessions or to the gateway."""

    sessions: ASGIApp
    gateway: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.sessions if is_for_session(scope["path"], Headers(scope=scope)) else self.gateway
        await app(scope, receive, send)
