"""Passes connections on to one address, and to no other."""

import asyncio
import contextlib
import socket

PIECE_BYTES = 2**16


class Relay:
    """Serves a listener, which may be that of another network: what connects to it is connected to `address`.

    Example:
        relay = await Relay.start(listener, ("127.0.0.1", 8000))
        await relay.close()
    """

    def __init__(self, address: tuple[str, int]):
        self._address = address
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, listener: socket.socket, address: tuple[str, int]) -> "Relay":
        relay = cls(address)
        relay._server = await asyncio.start_server(relay._serve, sock=listener)
        return relay

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError):  # either side may go at any time, as without a relay
                await self._pass(reader, writer)
        finally:
            writer.close()
            self._connections.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection(*self._address)
        ways = [asyncio.create_task(_copy(reader, their_writer)), asyncio.create_task(_copy(their_reader, writer))]
        try:
            # The end of either way ends both: a server of HTTP hears by it that its client has gone.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            their_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
