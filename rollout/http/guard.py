"""Guards in front of the apps: who may call, how many requests run at once, how large a body is, and strict JSON."""

import asyncio
import json
import math
import re
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.serve import ServeConfig
from rollout.http.access import Access
from rollout.http.answers import ORDERS, PROBES, error_answer

MIB = 2**20
MAX_CONTROL_BYTES = 2**16
"""The size of the body of a control route, which holds some thousand ids of requests."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(slots=True)
class Guard:
    """ASGI middleware that refuses requests by their headers, and reads the whole body before the app sees the request,
    since all of our apps need it.

    The body of a refused request is read to its end and dropped: a client that is cut off while it sends never sees the
    answer.
    """

    app: ASGIApp
    limits: ServeConfig
    access: Access | None
    _under_way: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # nothing else is served
            raise ValueError(f"unexpected scope {scope['type']}")
        self._under_way += 1
        try:
            try:
                body = await self._body(scope, receive)
            except ClientDisconnect:
                return
            if isinstance(body, JSONResponse):
                return await body(scope, receive, send)
            await self.app(scope, replay(body, receive), send)
        finally:
            self._under_way -= 1

    async def _body(self, scope: Scope, receive: Receive) -> bytes | JSONResponse:
        """Return the body, or the refusal. Raises ClientDisconnect."""
        path = scope["path"]
        refusal = None if self.access is None else self.access.refusal(scope)
        if refusal is None and self._under_way > (maximum := self.limits.max_connections):
            refusal = _closing(path, 503, f"{maximum} requests are under way (serve.max_connections)")
        max_bytes, limit = self.limits.max_body_mb * MIB, f"serve.max_body_mb={self.limits.max_body_mb} MiB"
        if path in ORDERS | PROBES:
            max_bytes, limit = MAX_CONTROL_BYTES, f"{MAX_CONTROL_BYTES} bytes"
        body = await _read(receive, 0 if refusal is not None else max_bytes)
        if refusal is not None:
            return refusal
        return _closing(path, 413, f"the body has more than {limit}") if body is None else body


def _closing(path: str, status: int, message: str) -> JSONResponse:
    answer = error_answer(path, status, message)
    answer.headers["connection"] = "close"
    return answer


async def _read(receive: Receive, max_bytes: int) -> bytes | None:
    """Return the body; None when it has more than `max_bytes`, which are dropped as they come."""
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
    """Return a `receive` that gives the body first, and then the messages after it, such as a disconnect."""
    is_replayed = False

    async def receive_again() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def client_leaves(receive: Receive) -> None:
    """Return when the client of a request whose body was read goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until(leaving: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> None:
    """Do the work, and cancel it when `leaving` returns. Raise what it raises."""
    working, watching = asyncio.create_task(work), asyncio.create_task(leaving)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait((working, watching))
    if not working.cancelled():
        working.result()


# -- strict JSON -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StrictJson:
    """ASGI middleware in front of an app that parses bodies itself, such as vLLM's. It refuses JSON that Python's
    parser takes and an engine should not get: NaN, infinity, halves of characters."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "json" in Request(scope).headers.get("content-type", "").lower():
            body = await Request(scope, receive).body()
            try:
                _ = parse_strictly(body) if body else None
            except ValueError as error:
                return await error_answer(scope["path"], 400, str(error))(scope, receive, send)
            receive = replay(body, receive)
        await self.app(scope, receive, send)


def parse_strictly(body: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, whose message can be shown in ASCII."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant, parse_float=_finite)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()  # raises for half a surrogate pair
    except RecursionError:
        raise ValueError("the body is no valid JSON: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeError are ValueErrors
        raise ValueError(f"the body is no valid JSON: {ascii(str(error))[1:-1]}") from None
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:40]} is out of range")
    return value
