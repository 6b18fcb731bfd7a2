"""What stands in front of every app: who may call it, how large a body may be, and how long it may take to come."""

import asyncio
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.serve import ServeConfig
from rollout.http.access import Access
from rollout.http.answers import ORDERS, PROBES, error_answer

MIB = 2**20
MAX_CONTROL_BYTES = 2**16
"""Size of the body of a control route: some thousand ids of requests."""


@dataclass(slots=True)
class Guard:
    """ASGI middleware that decides by the headers whether a request is refused, and else reads its body before the app
    sees it, because all of ours need the whole body.

    The body of a request that is refused is read to its end and dropped: a client that is cut off while it sends never
    sees why.
    """

    app: ASGIApp
    limits: ServeConfig
    access: Access | None
    max_requests: int
    """At most serve.max_connections; fewer where the process may not open as many files."""
    _requests: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # nothing else is served
            raise ValueError(f"unexpected scope {scope['type']}")
        self._requests += 1
        try:
            try:
                body = await self._body(scope, receive)
            except ClientDisconnect:
                return
            if isinstance(body, JSONResponse):
                return await body(scope, receive, send)
            await self.app(scope, replay(body, receive), send)
        finally:
            self._requests -= 1

    async def _body(self, scope: Scope, receive: Receive) -> bytes | JSONResponse:
        """The body, or the refusal. Raises ClientDisconnect."""
        path, limits = scope["path"], self.limits
        refusal = None if self.access is None else self.access.refusal(scope)
        if refusal is None and self._requests > self.max_requests:
            refusal = _closing(path, 503, f"{self.max_requests} requests are under way (serve.max_connections)")
        is_control = path in ORDERS | PROBES
        max_bytes = MAX_CONTROL_BYTES if is_control else limits.max_body_mb * MIB
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                body = await _read(receive, 0 if refusal is not None else max_bytes)
        except TimeoutError:
            return _closing(path, 408, f"no whole body within serve.body_timeout_s={limits.body_timeout_s:g}")
        if refusal is not None:
            return refusal
        if body is None:
            limit = f"{max_bytes} bytes" if is_control else f"serve.max_body_mb={limits.max_body_mb} MiB"
            return _closing(path, 413, f"the body has more than {limit}")
        return body


def _closing(path: str, status: int, message: str) -> JSONResponse:
    answer = error_answer(path, status, message)
    answer.headers["connection"] = "close"
    return answer


async def _read(receive: Receive, max_bytes: int) -> bytes | None:
    """None when there are more than `max_bytes`."""
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        size += len(chunk := message.get("body", b""))
        chunks.append(chunk)
        if size > max_bytes:
            chunks.clear()
        more = message.get("more_body", False)
    return b"".join(chunks) if size <= max_bytes else None


def replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body first, and then what comes after it: that the client went away."""
    is_given = False

    async def receive_again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
