"""The bearer token that protects the control routes."""

import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RequireToken:
    """ASGI middleware: every path outside `open_paths` needs `Authorization: Bearer <token>`, and answers 401 without.

    Paths are closed by default, so that a new route is not open by mistake.
    """

    def __init__(self, app: ASGIApp, token: str, open_paths: Collection[str]):
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open_paths:
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("authorization", "").encode()
        if hmac.compare_digest(given, self._expected):  # takes as long for a good guess as for a bad one
            return await self._app(scope, receive, send)
        answer = JSONResponse(
            {"error": f"{scope['path']} needs 'Authorization: Bearer <serve.token>'"},
            status_code=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await answer(scope, receive, send)
