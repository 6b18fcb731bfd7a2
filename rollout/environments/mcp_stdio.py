"""The way to an MCP server that is a program, over its standard input and output.

It does what `mcp.client.stdio` does, which leaves the start to the event loop, and so to a fork: see `ChildProcess`.
https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#stdio
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from rollout.actors.child_process import ChildProcess
from rollout.actors.owned import kill_group

logger = logging.getLogger(__name__)
CHUNK = 1 << 16
"""The bytes that are read at once."""
END_S = 2.0
"""The seconds in which a server ends by itself once its input ends, then those after SIGTERM and after SIGKILL."""


@asynccontextmanager
async def program(command: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server, and give the streams that `mcp.Client` reads and writes. The process ends on leaving.

    Example:
        async with Client(program(["python", "my_server.py"], os.environ)) as client:
            ...

    Raises OSError and ValueError where the system does not start the program.
    """
    process = await ChildProcess.start(*command, env=dict(env), start_new_session=True)
    received, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, to_send = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_receive, process, received)
        tasks.start_soon(_send, process, to_send, received)
        tasks.start_soon(_pass_on, process.stderr)
        try:
            yield from_server, to_server
        finally:
            with anyio.CancelScope(shield=True):
                from_server.close()  # what still comes is read and dropped, so that the server can come to its end
                to_server.close()
                await _end(process)
            tasks.cancel_scope.cancel()  # a process that the server has started may hold its streams


async def _receive(process: ChildProcess, received: Any) -> None:
    line = bytearray()
    async with received:
        while chunk := await process.stdout.read(CHUNK):
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                line += end
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the session is over
                    await received.send(_message(bytes(line)))
                line.clear()
            line += rest


def _message(line: bytes) -> SessionMessage | Exception:
    """Return what stands in a line, or the error for the session to report."""
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        logger.exception("an MCP server wrote a line that is no message")
        return error


async def _send(process: ChildProcess, to_send: Any, received: Any) -> None:
    try:
        async with to_send:
            async for item in to_send:
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
    except OSError:  # the server reads no more, and the session must not wait for answers
        await received.aclose()


async def _pass_on(errors: asyncio.StreamReader) -> None:
    while chunk := await errors.read(CHUNK):
        sys.stderr.write(chunk.decode(errors="replace"))
        sys.stderr.flush()


async def _end(process: ChildProcess) -> None:
    """Return when the server has ended: by itself, by SIGTERM, or by SIGKILL for it and its process group."""
    process.stdin.close()
    if not await _has_ended(process):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        if not await _has_ended(process):
            kill_group(process.pid)
            if not await _has_ended(process):  # the kernel does not let go of it, and others wait for this session
                logger.error("MCP server %d does not end, although it was killed", process.pid)


async def _has_ended(process: ChildProcess) -> bool:
    with anyio.move_on_after(END_S):
        await process.wait()
        return True
    return False
