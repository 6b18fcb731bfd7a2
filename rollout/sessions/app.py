"""The HTTP app of sessions: a harness opens one, talks to the policy in the dialect of its client, and ends it."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout.http.access import Access
from rollout.http.answers import SESSIONS, error_answer
from rollout.sessions.backend import Reward, SessionBackend
from rollout.sessions.conversation import KEEPALIVE_S, Conversation, json_body, refusal, understood
from rollout.sessions.dialects import anthropic, openai_chat, openai_completions, openai_responses
from rollout.sessions.dialects.dialect import Dialect, id_without
from rollout.sessions.dialects.fields import Fields
from rollout.sessions.errors import BadRequestError, SessionError
from rollout.sessions.keys import SessionKeys

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": openai_chat.OpenAIChat(),
    "/v1/completions": openai_completions.OpenAICompletions(),
    "/v1/responses": openai_responses.OpenAIResponses(),
    "/v1/messages": anthropic.AnthropicMessages(),
}
PREFIXES = (openai_chat.PREFIX, openai_completions.PREFIX, openai_responses.PREFIX, anthropic.PREFIX)
Endpoint = Callable[[Request], Awaitable[Response]]


class SessionAccess(Access):
    """Only to open a session takes the server's token: all else takes the session's own key, which the app asks for.
    Hosts and origins are judged on every route."""

    __slots__ = ()

    def is_open(self, path: str) -> bool:
        return self.token is None or path.rstrip("/") != SESSIONS


def session_app(backend: SessionBackend, keys: SessionKeys, keepalive_s: float = KEEPALIVE_S) -> Starlette:
    """Serve it with `rollout.http.server.served(app, listener, limits, access)`, where `access` is a SessionAccess.

    The routes of the dialects are below each session, for harnesses that take a base URL, and at the top, for those
    whose path is fixed: there the key alone tells the session. `keys`: whoever opens or ends a session without HTTP
    issues and revokes its key there.
    """
    session = _Session(backend, keys)
    routes = [
        Route(SESSIONS, session.create, methods=["POST"]),
        Route(f"{SESSIONS}/{{session}}", session.transcript, methods=["GET"]),
        Route(f"{SESSIONS}/{{session}}/reward", session.reward, methods=["POST"]),
        Route(f"{SESSIONS}/{{session}}/finish", session.finish, methods=["POST"]),
        Route(f"{SESSIONS}/{{session}}/abort", session.abort, methods=["POST"]),
    ]
    for prefix in (f"{SESSIONS}/{{session}}", ""):
        for path, dialect in DIALECTS.items():
            endpoint = Conversation(backend=backend, keys=keys, dialect=dialect, keepalive_s=keepalive_s)
            routes.append(Route(prefix + path, endpoint, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/messages/count_tokens", session.count_tokens, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/models", session.models, methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={SessionError: _refuse, HTTPException: _no_route})
    app.router.redirect_slashes = False
    return app


class _Session:
    """The routes that generate nothing."""

    def __init__(self, backend: SessionBackend, keys: SessionKeys):
        self._backend = backend
        self._keys = keys

    async def create(self, request: Request) -> Response:
        """The body is the task: what it holds is between the harness and its reward."""
        task = await json_body(request)
        if not isinstance(task, dict):
            raise BadRequestError("the body must be an object, the fields of the task")
        session = await self._backend.create(task)
        base_url = f"{request.base_url}{SESSIONS[1:]}/{session}"
        return JSONResponse({"id": session, "key": self._keys.issue(session), "base_url": base_url}, status_code=201)

    async def transcript(self, request: Request) -> Response:
        return JSONResponse(await self._backend.transcript(self._of(request)))

    async def reward(self, request: Request) -> Response:
        session = self._of(request)
        await self._backend.reward(session, understood(read_reward, await json_body(request)))
        return JSONResponse({"id": session})

    async def finish(self, request: Request) -> Response:
        session = self._of(request)
        await self._backend.finish(session)
        self._keys.revoke(session)
        return JSONResponse({"id": session})

    async def abort(self, request: Request) -> Response:
        session = self._of(request)
        await self._backend.abort(session)
        self._keys.revoke(session)
        return JSONResponse({"id": session})

    async def count_tokens(self, request: Request) -> Response:
        session = self._of(request)
        asked = understood(anthropic.parse_count, await json_body(request))
        return JSONResponse({"input_tokens": await self._backend.count_tokens(session, asked)})

    async def models(self, request: Request) -> Response:
        """One list that clients of OpenAI and of Anthropic can read."""
        self._of(request)
        model = {"id": self._backend.model, "display_name": self._backend.model, "owned_by": "slipstream"}
        model |= {"object": "model", "type": "model", "created": 0, "created_at": "1970-01-01T00:00:00Z"}
        ends = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return JSONResponse({"object": "list", "data": [model], **ends})

    def _of(self, request: Request) -> str:
        return self._keys.session_of(request.headers, request.path_params.get("session"))


def read_reward(body: Any) -> Reward:
    """{"value": 1.0, "turn": "chatcmpl-...", "metrics": {"steps": 3}}: `turn` is the id of an answer as the client got
    it, or without its prefix. Raises BadRequestError."""
    fields = Fields(body)
    values, answer_id, metrics = fields.numbers("value"), fields.text("turn"), fields.mapping("metrics")
    if not values:
        raise fields.refuse("value", None, "a finite number")
    fields.end()
    given = (id_without(prefix, answer_id) for prefix in PREFIXES)
    numbers = Fields(metrics, "metrics").numbers(*metrics)
    return Reward(value=values["value"], answer_id=next(filter(None, given), answer_id), metrics=numbers)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, SessionError)
    return refusal(request.url.path, error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    return error_answer(path, error.status_code, f"{request.method} {ascii(path)}: {error.detail}")
