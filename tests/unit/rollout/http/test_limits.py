"""What clients cannot do to a server, over real sockets: hold it up, fill it, or make it answer 500."""

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

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
from rollout.http.server import listen, served
from rollout.http.token import Token
from rollout.replica.app import ReplicaControl, replica_app
from tests.support.fakes import ClockedEngine
from tests.support.http_clients import client_of, make_replica
from tests.support.paths import ROOT

SOON_S = 0.3
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
Connect = Callable[..., Awaitable["Connection"]]


class Connection:
    """One client's connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def rest(self) -> str:
        """What comes until the server closes the connection."""
        async with asyncio.timeout(10):
            return (await self.reader.read()).decode()

    async def status(self, sent: bytes = b"") -> int:
        """Of the next answer, which has no body or says its length."""
        self.writer.write(sent)
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
            await self.reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
        return int(head.split()[1])


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body; "/slow" only when the client has gone."""
    body = await Request(scope, receive).body()
    while scope["path"] == "/slow" and (await receive())["type"] != "http.disconnect":
        pass
    await PlainTextResponse(str(len(body)))(scope, receive, send)


def on_server(limits: ServeConfig, test: Callable[[Connect], Awaitable[None]]) -> None:
    async def main() -> None:
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

    asyncio.run(main())


HALF = {
    "nothing": (b"", ""),
    "a part of the line": (b"GET / HT", "408"),
    "a part of the headers": (b"GET / HTTP/1.1\r\nhost: lo", "408"),
    "a part of the second request": (GET + b"GET / HT", "408"),
    "a part of the body": (POST + b"content-length: 9\r\n\r\nabc", "408"),
    "an endless body": (POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "408"),
}


@pytest.mark.parametrize(("sent", "answer"), HALF.values(), ids=HALF)
def test_a_request_that_does_not_come_is_given_up(sent: bytes, answer: str) -> None:
    async def test(connect: Connect) -> None:
        found = (await (await connect(sent)).rest()).split("HTTP/1.1 ")
        assert found[-1][:3] == answer
        assert len(found) == 1 + bool(answer) + sent.startswith(GET)

    on_server(ServeConfig(header_timeout_s=SOON_S, body_timeout_s=SOON_S), test)


def test_an_answered_client_does_not_hold_its_connection_with_empty_lines() -> None:
    async def test(connect: Connect) -> None:
        connection = await connect()
        assert await connection.status(GET) == 200
        connection.writer.write(b"\r\n")
        assert (await connection.rest()).startswith("HTTP/1.1 408 ")

    on_server(ServeConfig(header_timeout_s=SOON_S), test)


def test_what_comes_slowly_but_in_time_and_what_is_answered_slowly_are_served() -> None:
    async def test(connect: Connect) -> None:
        slow = await connect(GET.replace(b" / ", b" /slow "))
        steady = await connect()
        for _ in range(4):
            for byte in GET[:-1]:
                steady.writer.write(bytes([byte]))
                await asyncio.sleep(0.002)
            assert await steady.status(GET[-1:]) == 200
        assert not slow.reader.at_eof()

    on_server(ServeConfig(header_timeout_s=SOON_S, body_timeout_s=SOON_S), test)


def test_a_blocked_event_loop_is_no_fault_of_a_client_that_shares_it() -> None:
    """As of a harness in an agent worker that gets little of its processor."""

    async def test(connect: Connect) -> None:
        connection = await connect()
        for _ in range(3):
            time.sleep(1.5 * SOON_S)
            await asyncio.sleep(0)
        assert await connection.status(GET) == 200

    on_server(ServeConfig(header_timeout_s=SOON_S), test)


def test_as_many_clients_as_there_are_harnesses_may_connect_while_the_event_loop_is_busy() -> None:
    async def test(connect: Connect) -> None:
        address = (await connect()).writer.get_extra_info("peername")
        with contextlib.ExitStack() as connections:
            for _ in range(
                500
            ):  # nothing is accepted meanwhile; past the backlog a connection takes a second, or fails
                connections.enter_context(socket.create_connection(address, timeout=0.9))
            assert (await asyncio.wait_for((await connect()).status(GET), 10)) == 200

    on_server(ServeConfig(), test)


def test_headers_and_bodies_have_a_size() -> None:
    limits = ServeConfig(max_header_bytes=2048, max_body_mb=1)

    async def test(connect: Connect) -> None:
        for headers in (b"a: " + b"x" * 3000 + b"\r\n\r\n", b"a: " + b"x" * 3000, b"a: b\r\n" * 1000):
            assert (await (await connect(POST + headers)).rest()).startswith("HTTP/1.1 431 ")
        assert (await (await connect(b"GET /" + b"x" * 3000)).rest()).startswith("HTTP/1.1 431 ")
        large = b"x" * (1 << 20)
        kept = await connect()
        assert await kept.status(POST + b"content-length: %d\r\n\r\n" % len(large) + large) == 200
        for body in (large + b"x", 5 * large):  # read to its end, so that the client sees the answer
            answer = await (await connect(POST + b"content-length: %d\r\n\r\n" % len(body) + body)).rest()
            assert answer.startswith("HTTP/1.1 413 ") and "serve.max_body_mb=1 MiB" in answer
        assert await kept.status(GET) == 200

    on_server(limits, test)


def test_headers_behind_a_request_that_is_being_answered_have_a_size_too() -> None:
    async def test(connect: Connect) -> None:
        for headers in (b"a: " + b"x" * 1000, b"a: b\r\n" * 200):
            connection = await connect(GET.replace(b" / ", b" /slow ") + POST)
            connection.writer.write(headers)
            await asyncio.sleep(0.1)
            assert not connection.reader.at_eof()
            for _ in range(100):
                connection.writer.write(headers)
            with contextlib.suppress(ConnectionError):  # closed with bytes that were not read
                assert await connection.rest() == "", "no answer: it would be taken for that of the first request"
        follows = await connect()
        assert await follows.status(POST + b"content-length: 9000\r\n\r\n" + b"x" * 9000 + GET[:9]) == 200
        assert await follows.status(GET[9:]) == 200

    on_server(ServeConfig(max_header_bytes=2048), test)


@pytest.mark.parametrize("half", [b"GET / HT", POST + b"content-length: 9\r\n\r\nabc"], ids=["headers", "body"])
def test_half_open_and_idle_connections_make_room_for_new_ones(half: bytes) -> None:
    async def test(connect: Connect) -> None:
        idle = [await connect() for _ in range(4)]
        assert [await connection.status(GET) for connection in idle] == [200] * 4
        half_open: list[Connection] = []
        for _ in range(50):
            half_open.append(await connect(half))
            await asyncio.sleep(0.005)
        assert await (await connect()).status(GET) == 200
        assert [await connection.rest() for connection in (*idle, *half_open[:40])] == [""] * 44

    on_server(ServeConfig(max_connections=8), test)


def test_where_all_connections_are_at_work_a_request_is_answered_with_503() -> None:
    slow = GET.replace(b" / ", b" /slow ")

    async def test(connect: Connect) -> None:
        working = [await connect(slow) for _ in range(8)]
        assert [await (await connect()).status(GET) for _ in range(3)] == [503] * 3
        working[0].writer.transport.abort()
        await asyncio.sleep(SOON_S)
        assert await (await connect()).status(GET) == 200
        assert not any(connection.reader.at_eof() for connection in working[1:])

    on_server(ServeConfig(max_connections=8), test)


FEW_FILES = """
    import asyncio, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
    from rollout.http.server import listen, served
    from starlette.responses import PlainTextResponse

    async def main():
        listener = listen("127.0.0.1", 0)
        async with served(PlainTextResponse("here"), listener):
            print(listener.getsockname()[1], flush=True)
            await asyncio.to_thread(sys.stdin.read)

    asyncio.run(main())
"""


def test_a_process_with_few_files_answers_under_a_flood(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(FEW_FILES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
    assert process.stdin is not None and process.stdout is not None
    host, port = "127.0.0.1", int(process.stdout.readline())

    async def flood() -> None:
        half_open = [await asyncio.open_connection(host, port) for _ in range(600)]
        for _, writer in half_open:
            writer.write(b"GET / HT")
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            assert (await client.get(f"http://{host}:{port}/")).text == "here"
        for _, writer in half_open:
            writer.transport.abort()

    asyncio.run(flood())
    process.stdin.close()
    assert process.wait(timeout=20) == 0
    written = (tmp_path / "log").read_text()
    assert len(written) < 5000, written[-3000:]


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


@pytest.mark.parametrize("body", BAD_JSON.values(), ids=BAD_JSON)
def test_bad_json_is_the_clients_mistake(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        listener = listen("127.0.0.1", 0)
        replica = make_replica(ClockedEngine())
        await replica.tag_loaded(1)
        url = "http://{}:{}".format(*listener.getsockname())
        headers = {"content-type": "application/json"}
        client = httpx.AsyncClient(trust_env=False, base_url=url, headers=headers)
        app = replica_app(replica, PlainTextResponse("generated"))
        async with client, served(app, listener):
            for content_type in (headers, {"content-type": ""}, {"content-type": "application/x-www-form-urlencoded"}):
                answer = await client.post("/v1/abort_requests", content=body, headers=content_type)
                assert 400 <= answer.status_code < 500, answer.text
                json.loads(answer.content)
            generation = await client.post("/v1/completions", content=body)
            assert generation.status_code == (200 if body in (b"", b'{"req_ids": 3}') else 400)
            for query in ("timeout_s=nan", "timeout_s=inf", "timeout_s=1e400", "mode=%ED%A0%80", "mode=%00"):
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
    guard = Guard(echo, ServeConfig(), Access.of(ServeConfig(), Token("s3cret", is_given=True), on_loopback=True), 9)
    await guard({"type": "http", "path": "/v1/completions", "headers": [(b"host", b"localhost")]}, receive, send)
    assert sent[0]["status"] == 401 and len(held) == 64 and max(held) <= 1


async def test_control_routes_take_small_bodies() -> None:
    replica = make_replica(ClockedEngine())
    app = control_app(ReplicaControl(replica), with_engine_metrics=False)
    routes = {getattr(route, "path", "") for route in app.routes}
    assert routes - {"/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc"} == ORDERS | PROBES
    async with client_of(Guard(app, ServeConfig(), None, 9)) as client:
        answer = await client.post("/v1/abort_requests", content=b" " * 70_000)
        assert (answer.status_code, answer.json()) == (413, {"error": "the body has more than 65536 bytes"})
