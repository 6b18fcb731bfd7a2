"""MCP servers over standard streams, on the event loop that Ray uses. The tools of a real one: test_mcp."""

import asyncio
import subprocess
import sys
from typing import Any

import psutil
import pytest
import uvloop
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCNotification

from rollout.environments import mcp_stdio
from rollout.environments.mcp_stdio import program


def message(text: str) -> SessionMessage:
    return SessionMessage(JSONRPCNotification(jsonrpc="2.0", method="said", params={"text": text}))


def test_messages_larger_than_a_pipe_and_lines_that_are_none() -> None:
    async def main() -> list[Any]:
        async with program(["sh", "-c", "echo no message; cat"], {}) as (read, write):
            wrong = await read.receive()
            got = []
            for text in ("ä" * 300_000, "two\nlines"):
                await write.send(message(text))
                got.append((await read.receive()).message.params["text"])
            return [type(wrong).__name__, *got]

    assert uvloop.run(main()) == ["ValidationError", "ä" * 300_000, "two\nlines"]


def test_errors_are_passed_on_and_the_end_of_a_server_ends_the_streams(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> bool:
        async with program(["sh", "-c", "echo failed >&2; exec sleep 0.2"], {}) as (read, _):
            return [item async for item in read] == []

    assert uvloop.run(main()) and capsys.readouterr().err == "failed\n"


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_server_that_does_not_end_is_killed(is_cancelled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_stdio, "END_S", 0.2)
    script = 'import signal, sys; signal.signal(15, signal.SIG_IGN); print("{}", flush=True); signal.pause()'

    async def use() -> None:
        async with program([sys.executable, "-c", script], {}) as (read, _):
            await read.receive()  # it ignores the signal by now
            if is_cancelled:
                asyncio.current_task().cancel()  # pyright: ignore[reportOptionalMemberAccess]
                await asyncio.sleep(60)

    async def main() -> bool:
        using = asyncio.create_task(use())
        await asyncio.wait([using], timeout=60)
        return using.cancelled()

    before = psutil.Process().children()
    assert uvloop.run(main()) is is_cancelled
    assert psutil.Process().children() == before


HELD = """
import os, threading, uvloop
from rollout.environments.mcp_stdio import program

lock = threading.Lock()
os.register_at_fork(after_in_child=lock.acquire)

async def main():
    lock.acquire()
    async with program(["echo", "{}"], {}) as (read, _):
        print(type(await read.receive()).__name__)

uvloop.run(main())
"""


def test_a_start_does_not_fork() -> None:
    """As `mcp.client.stdio` does on uvloop, where the copy may wait for a lock for good."""
    ended = subprocess.run([sys.executable, "-c", HELD], capture_output=True, timeout=60, check=False)
    assert ended.stdout == b"ValidationError\n", ended.stderr.decode()
