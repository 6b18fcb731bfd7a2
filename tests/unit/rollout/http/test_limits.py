"""Limits of a server over real sockets: clients cannot fill it or make it answer 500."""

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import Awaitable, Callable

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from configs.schema import ServeConfig
from rollout.http.access import Access
from rollout.http.answers import ORDERS, PROBES
from rollout.http.control import control_app
from rollout.http.guard import Guard
from rollout.http.replica_app import ReplicaControl, replica_app
from rollout.http.server import listen, served
from rollout.http.token import Token
from tests.support.fakes import ClockedEngine
from tests.support.http_clients import client_of, make_replica
from tests.support.real_clock import Test, beside

SOON_S = 0.3
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
Connect = Callable[..., Awaitable["Connection"]]


class Connection:
    """One client's connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def rest(self) -> str:
        """Return the bytes that come until the server closes the connection."""
        async with asyncio.timeout(10):
            return (await self.reader.read()).decode()

    async def status(self, sent: bytes = b"") -> int:
        """Return the status of the next answer, which says the length of its body."""
        self.writer.write(sent)
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
            await self.reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
        return int(head.split()[1])


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body; "/slow" answers only when the client has gone."""
    body = await Request(scope, receive).body()
    while scope["path"] == "/slow" and (await receive())["type"] != "http.disconnect":
        pass
    await PlainTextResponse(str(len(body)))(scope, receive, send)


def on_server(limits: ServeConfig) -> Callable[[Test], Callable[..., None]]:
    async def serve(test: Callable[[Connect], Awaitable[None]]) -> None:
        listener = listen("127.0.0.1", 0)
        opened: list[Connection] = []

        async def connect(sent: bytes = b"") -> Connection:
            connection = Connection(*await asyncio.open_connection(*listener.getsockname()))
            opened.append(connection)
            connection.writer.write(sent)
            return connection

        async with served(echo, listener, limits):
            await test(connect)
            for connection in opened:
                connection.writer.transport.abort()

    return beside(serve)


@on_server(ServeConfig())
async def test_as_many_clients_as_there_are_harnesses_may_connect_while_the_event_loop_is_busy(
    connect: Connect,
) -> None:
    address = (await connect()).writer.get_extra_info("peername")
    with contextlib.ExitStack() as connections:
        # Nothing is accepted meanwhile: past the backlog a connection takes a second, or fails.
        for _ in range(500):
            connections.enter_context(socket.create_connection(address, timeout=0.9))
        assert (await asyncio.wait_for((await connect()).status(GET), 10)) == 200


@on_server(ServeConfig(max_header_bytes=2048, max_body_mb=1))
async def test_headers_and_bodies_have_a_size(connect: Connect) -> None:
    for headers in (b"a: " + b"x" * 3000, b"a: b\r\n" * 1000):
        assert (await (await connect(POST + headers)).rest()).startswith("HTTP/1.1 400 ")
    assert (await (await connect(b"GET /" + b"x" * 3000)).rest()).startswith("HTTP/1.1 400 ")
    large = b"x" * (1 << 20)
    kept = await connect()
    assert await kept.status(POST + b"content-length: %d\r\n\r\n" % len(large) + large) == 200
    for body in (large + b"x", 5 * large):  # read to its end, so that the client sees the answer
        answer = await (await connect(POST + b"content-length: %d\r\n\r\n" % len(body) + body)).rest()
        assert answer.startswith("HTTP/1.1 413 ") and "serve.max_body_mb=1 MiB" in answer
    assert await kept.status(GET) == 200


@on_server(ServeConfig(max_connections=8))
async def test_where_as_many_requests_are_under_way_as_may_be_one_more_is_answered_with_503(connect: Connect) -> None:
    slow = GET.replace(b" / ", b" /slow ")
    idle = [await connect() for _ in range(20)]
    assert [await connection.status(GET) for connection in idle] == [200] * 20, "idle connections do not count"
    working = [await connect(slow) for _ in range(8)]
    assert [await (await connect()).status(GET) for _ in range(3)] == [503] * 3
    working[0].writer.transport.abort()
    await asyncio.sleep(SOON_S)
    assert await (await connect()).status(GET) == 200
    assert not any(connection.reader.at_eof() for connection in working[1:])


BAD_JSON = {
    "NaN": b'{"req_ids": [NaN]}',
    "infinity": b'{"abort_all": 1e400}',
    "half a character": b'{"req_ids": ["\\ud800"]}',
    "half a character as bytes": b'{"req_ids": ["\xed\xa0\x80"]}',
    "half a character in a key": b'{"\\udfff": 1}',
    "half a character as a value": b'{"req_ids": "\\ud800"}',
    "no UTF-8": b'{"req_ids": ["\xff"]}',
    "no text": b"\xff\xfe",
    "deep": b'{"req_ids": ' + b"[" * 100_000,
    "a long number": b'{"abort_all": ' + b"1" * 10_000 + b"}",
    "no JSON": b"{",
    "another type": b'{"req_ids": 3}',
    "nothing": b"",
}


CONTENT_TYPES = ("application/json", "", "application/x-www-form-urlencoded")
BAD_QUERIES = ("timeout_s=nan", "timeout_s=inf", "timeout_s=1e400", "mode=%ED%A0%80", "mode=%00")


def test_bad_json_is_the_clients_mistake(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        listener = listen("127.0.0.1", 0)
        replica = make_replica(ClockedEngine())
        await replica.tag_loaded(1)
        url = "http://{}:{}".format(*listener.getsockname())
        client = httpx.AsyncClient(trust_env=False, base_url=url, headers={"content-type": CONTENT_TYPES[0]})
        app = replica_app(replica, PlainTextResponse("generated"))
        async with client, served(app, listener):
            for name, body in BAD_JSON.items():
                for content_type in CONTENT_TYPES:
                    headers = {"content-type": content_type}
                    answer = await client.post("/v1/abort_requests", content=body, headers=headers)
                    assert 400 <= answer.status_code < 500, f"{name}: {answer.text}"
                    json.loads(answer.content)
                generation = await client.post("/v1/completions", content=body)
                assert generation.status_code == (200 if name in ("nothing", "another type") else 400), name
            for query in BAD_QUERIES:
                assert (await client.post(f"/pause?{query}")).status_code == 422, query

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert not caplog.records


async def test_a_refused_body_is_dropped_as_it_comes_and_reaches_no_app() -> None:
    chunks = [bytearray(1 << 16) for _ in range(64)]
    held: list[int] = []
    sent: list[Message] = []

    async def receive() -> Message:
        held.append(sum(sys.getrefcount(chunk) > references for chunk in chunks))
        return {"type": "http.request", "body": chunks[len(held) - 1], "more_body": len(held) < len(chunks)}

    async def send(message: Message) -> None:
        sent.append(message)

    references = max(sys.getrefcount(chunk) for chunk in chunks)
    guard = Guard(echo, ServeConfig(), Access.of(ServeConfig(), Token("s3cret", is_configured=True), on_loopback=True))
    await guard({"type": "http", "path": "/v1/completions", "headers": [(b"host", b"localhost")]}, receive, send)
    assert sent[0]["status"] == 401 and len(held) == 64 and max(held) <= 1


async def test_control_routes_take_small_bodies() -> None:
    replica = make_replica(ClockedEngine())
    app = control_app(ReplicaControl(replica))
    routes = {getattr(route, "path", "") for route in app.routes}
    assert routes - {"/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc"} == ORDERS | PROBES
    async with client_of(Guard(app, ServeConfig(), None)) as client:
        answer = await client.post("/v1/abort_requests", content=b" " * 70_000)
        assert (answer.status_code, answer.json()) == (413, {"error": "the body has more than 65536 bytes"})
