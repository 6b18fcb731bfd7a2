"""The relay between a sandbox and its session."""

import asyncio
import socket

from rollout.environments.sandbox.relay import Relay
from tests.support.real_clock import on_real_clock


@on_real_clock
async def test_bytes_pass_both_ways_and_the_end_of_a_client_is_told_at_once() -> None:
    has_gone = asyncio.Event()

    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line.upper())
        has_gone.set()
        writer.close()

    server = await asyncio.start_server(upper, "127.0.0.1", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    relay = await Relay.start(listener, server.sockets[0].getsockname()[:2])
    async with asyncio.timeout(10):
        clients = [await asyncio.open_connection(*listener.getsockname()[:2]) for _ in range(2)]
        for number, (reader, writer) in enumerate(clients):
            text = b"%d" % number + b"a" * 60_000 + b"\n"
            writer.write(text)
            assert await reader.readline() == text.upper()
        clients[0][1].close()
        await has_gone.wait()
        await relay.close()
        assert await clients[1][0].read() == b"", "the rest ends with the relay"
        server.close()


@on_real_clock
async def test_a_client_of_a_session_that_is_gone_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()[:2]
    listener = socket.create_server(("127.0.0.1", 0))
    relay = await Relay.start(listener, address)
    async with asyncio.timeout(10):
        reader, _ = await asyncio.open_connection(*listener.getsockname()[:2])
        assert await reader.read() == b""
        await relay.close()
