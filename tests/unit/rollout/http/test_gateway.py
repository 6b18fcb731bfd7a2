"""The gateway: what goes up to a replica and comes back, byte by byte, and what happens when either side goes away."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from configs.schema import ServeConfig
from configs.validate import ConfigError
from rollout.http.access import Access
from rollout.http.gateway import Proxy, gateway_app
from rollout.http.guard import Guard
from rollout.http.replica_app import ReplicaControl
from rollout.http.server import listen, listener_url, served
from rollout.http.token import Token
from rollout.router import ReplicaRouter
from tests.support.fakes import ClockedEngine, settle
from tests.support.http_clients import make_replica
from tests.support.real_clock import on_real_clock

URLS = {"r0": "http://replica-0", "r1": "http://replica-1"}


class Upstream(httpx.AsyncBaseTransport):
    """The replicas: notes what it is asked. The test feeds it parts of answers, an error, or None as the end."""

    def __init__(self, status: int = 200, error: Exception | None = None):
        self.requests: list[httpx.Request] = []
        self.parts: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.closed = 0
        self._status = status
        self._error = error

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self._error is not None:
            raise self._error
        headers = {"content-type": "text/event-stream", "connection": "close", "x-own": "1"}
        return httpx.Response(self._status, headers=headers, stream=_Answer(self))


class _Answer(httpx.AsyncByteStream):
    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (part := await self._upstream.parts.get()) is not None:
            if isinstance(part, Exception):
                raise part
            yield part

    async def aclose(self) -> None:
        self._upstream.closed += 1


@dataclass
class Client:
    """One request to an ASGI app, and what came back so far."""

    app: Any
    path: str = "/v1/completions"
    query: bytes = b""
    headers: dict[str, str] = field(default_factory=lambda: {"host": "127.0.0.1"})
    sent: list[dict[str, Any]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    body_taken: bool = False

    def start(self) -> "asyncio.Task[None]":
        scope = {
            "type": "http",
            "method": "POST",
            "path": self.path,
            "query_string": self.query,
            "headers": [(key.encode(), value.encode()) for key, value in self.headers.items()],
        }
        return asyncio.create_task(self.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self.body_taken:
            self.body_taken = True
            return {"type": "http.request", "body": b'{"prompt": "hi"}', "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


def gateway(
    upstream: Upstream, token: str | None = None, names: tuple[str, ...] = ("r0", "r1")
) -> tuple[Any, ReplicaRouter]:
    router = ReplicaRouter(list(names), 99)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    client = httpx.AsyncClient(transport=upstream, headers=headers)
    control = ReplicaControl(make_replica(ClockedEngine()))
    made = None if token is None else Token(token, is_configured=False)
    access = Access.of(ServeConfig(), made, on_loopback=True)
    return Guard(gateway_app(control, Proxy(client, router, URLS, 10.0)), ServeConfig(), access), router


def in_flight(router: ReplicaRouter) -> float:
    return router.gauges()["rollout/inflight_trajectories"]


async def test_a_request_goes_up_as_it_is_and_the_answer_comes_back_part_by_part() -> None:
    upstream = Upstream(status=201)
    app, router = gateway(upstream, token="inner")
    headers = {"authorization": "Bearer the client's", "x-request-id": "job-1", "connection": "close"}
    headers["origin"] = "http://localhost:3000"  # which the gateway knows and a replica elsewhere does not
    client = Client(app, query=b"a=1&b=%20", headers=headers | {"host": "localhost"})
    task = client.start()
    await settle()
    (request,) = upstream.requests
    assert (request.method, str(request.url)) == ("POST", "http://replica-0/v1/completions?a=1&b=%20")
    assert (request.content, request.headers["x-request-id"]) == (b'{"prompt": "hi"}', "job-1")
    assert (request.headers["authorization"], request.headers["host"]) == ("Bearer inner", "replica-0")
    assert "origin" not in request.headers
    for number, part in enumerate([b"data: 1\n\n", b"data: 2\n\n"], start=1):
        upstream.parts.put_nowait(part)
        await settle()
        assert client.body.count(b"data") == number and not task.done()
    assert in_flight(router) == 1
    upstream.parts.put_nowait(None)
    await task
    assert client.status == 201
    names = {name for name, _ in client.sent[0]["headers"]}
    assert b"x-own" in names and b"connection" not in names
    assert (in_flight(router), upstream.closed) == (0, 1)


@pytest.mark.parametrize("status", [400, 404, 503])
async def test_errors_of_the_replica_are_passed_on(status: int) -> None:
    upstream = Upstream(status)
    upstream.parts.put_nowait(b'{"error": "no such model"}')
    upstream.parts.put_nowait(None)
    app, _ = gateway(upstream)
    client = Client(app, path="/v1/chat/completions")
    await client.start()
    assert (client.status, client.body) == (status, b'{"error": "no such model"}')


async def test_a_client_that_goes_away_ends_its_request_at_the_replica() -> None:
    upstream = Upstream()
    app, router = gateway(upstream)
    client = Client(app)
    task = client.start()
    upstream.parts.put_nowait(b"data: 1\n\n")
    await settle()
    client.gone.set()
    await task
    assert (upstream.closed, in_flight(router)) == (1, 0)


async def test_a_replica_that_cannot_be_reached_is_named() -> None:
    app, router = gateway(Upstream(error=httpx.ConnectError("refused")))
    client = Client(app)
    await client.start()
    assert client.status == 502
    assert json.loads(client.body)["error"]["message"] == "r0 did not answer: ConnectError('refused')"
    assert in_flight(router) == 0


async def test_an_answer_that_breaks_off_is_not_passed_off_as_whole() -> None:
    upstream = Upstream()
    app, router = gateway(upstream)
    client = Client(app)
    upstream.parts.put_nowait(b"data: 1\n\n")
    upstream.parts.put_nowait(httpx.ReadError("the replica died"))
    with pytest.raises(httpx.ReadError):  # the server then cuts the connection
        await client.start()
    assert client.sent[-1]["more_body"], "no end was sent"
    assert in_flight(router) == 0


async def test_without_a_replica_in_service_a_request_waits_a_while_for_one() -> None:
    upstream = Upstream()
    app, router = gateway(upstream)
    for name in URLS:
        await router.eject(name, RuntimeError("torn"))
    patient = Client(app)
    task = patient.start()
    await asyncio.sleep(9)
    assert upstream.requests == []
    await router.admit("r1")
    upstream.parts.put_nowait(None)
    await task
    assert (patient.status, upstream.requests[0].url.host) == (200, "replica-1")
    await router.eject("r1", RuntimeError("torn again"))
    waited = Client(app)
    await waited.start()
    assert (waited.status, asyncio.get_running_loop().time()) == (503, 19)
    assert json.loads(waited.body)["error"]["message"].startswith("waiting for a replica in service took longer")
    for name in URLS:
        await router.remove(name, RuntimeError("died"))
    refused = Client(app)
    await refused.start()
    assert (refused.status, asyncio.get_running_loop().time()) == (503, 19), "nobody will come back"


async def test_generation_needs_no_token_at_the_gateway_and_control_does() -> None:
    upstream = Upstream()
    upstream.parts.put_nowait(None)
    app, _ = gateway(upstream, token="inner")
    generation, control = Client(app), Client(app, path="/pause")
    await asyncio.gather(generation.start(), control.start())
    assert (generation.status, control.status) == (200, 401)


@on_real_clock
async def test_an_app_is_served_while_the_block_runs() -> None:
    listener = listen("127.0.0.1", 0)
    url, port = listener_url(listener), listener.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"serve.host=127.0.0.1, serve.port={port}: cannot listen there"):
        listen("127.0.0.1", port)
    async with httpx.AsyncClient(trust_env=False) as client:
        async with served(PlainTextResponse("here"), listener):
            assert (await client.get(url)).text == "here"
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
