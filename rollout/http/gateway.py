"""One address for all replicas: control routes act on the fleet, generation goes to the least loaded replica."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from configs.runtime.deadline import within
from rollout.errors import NoReplicaLeftError
from rollout.http.answers import GENERATION, error_answer
from rollout.http.control import Controlled, control_app
from rollout.http.guard import client_leaves, run_until
from rollout.http.token import Token
from rollout.router import ReplicaRouter

# Headers that belong to one connection and not to the request (RFC 9110, 7.6.1), or are set anew for the next hop.
NOT_PASSED_ON = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host"}
# The gateway has judged the origin; a replica, which listens elsewhere, knows other names.
NOT_PASSED_UP = NOT_PASSED_ON | {b"content-length", b"authorization", b"proxy-authorization", b"origin"}


def gateway_app(
    controlled: Controlled, proxy: "Proxy | None", run_metrics: Callable[[], Mapping[str, float]] = dict
) -> FastAPI:
    """Return the app of the gateway. Without a `proxy` it has only the control routes. `run_metrics` returns the latest
    metrics of the run, for /metrics."""
    app = control_app(controlled, run_metrics)
    for path, method in GENERATION.items() if proxy is not None else ():
        app.add_route(path, proxy, methods=[method])  # pyright: ignore[reportArgumentType]
    return app


def upstream_client(token: Token | None, route_timeout_s: float) -> httpx.AsyncClient:
    """Return the client that connects to the replicas. Answers have no deadline: a frozen request may last for as long
    as its client stays."""
    headers = {"accept-encoding": "identity"} | ({} if token is None else {"authorization": f"Bearer {token.value}"})
    return httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(None, connect=route_timeout_s),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )


@dataclass
class Proxy:
    """ASGI endpoint that sends a request to one replica, and streams its answer back byte by byte."""

    client: httpx.AsyncClient
    router: ReplicaRouter
    urls: Mapping[str, str]
    """The URLs of replicas, by name."""
    route_timeout_s: float
    """The value of serve.route_timeout_s."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = Request(scope, receive)
            body = await request.body()
        except ClientDisconnect:
            return
        # Cancelling it closes the connection to the replica, which ends the request there.
        await run_until(client_leaves(receive), self._relay(request, body, send))

    async def _relay(self, request: Request, body: bytes, send: Send) -> None:
        try:
            async with within(self.route_timeout_s, "serve.route_timeout_s", "waiting for a replica in service"):
                name = await self.router.acquire(1)
        except (TimeoutError, NoReplicaLeftError) as error:
            return await _answer(request, send, 503, str(error))
        try:
            await self._relay_to(name, request, body, send)
        finally:
            self.router.release(name, 1)

    async def _relay_to(self, name: str, request: Request, body: bytes, send: Send) -> None:
        # From the request line: starlette builds `request.url` from the Host header, too, which a client chooses.
        path, query = request.scope["path"], request.scope["query_string"]
        url = httpx.URL(self.urls[name]).copy_with(path=path, query=query)
        headers = [(key, value) for key, value in request.headers.raw if key not in NOT_PASSED_UP]
        started = False
        try:
            async with self.client.stream(request.method, url, content=body, headers=headers) as upstream:
                kept = [(key, value) for key, value in upstream.headers.raw if key.lower() not in NOT_PASSED_ON]
                await send({"type": "http.response.start", "status": upstream.status_code, "headers": kept})
                started = True
                async for chunk in upstream.aiter_raw():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except httpx.TransportError as error:
            if started:
                raise  # cuts the connection, so that the client does not take a part of the answer for the whole
            await _answer(request, send, 502, f"{name} did not answer: {error!r}")


async def _answer(request: Request, send: Send, status: int, message: str) -> None:
    await error_answer(request.scope["path"], status, message)(request.scope, request.receive, send)
