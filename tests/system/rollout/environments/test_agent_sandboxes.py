"""Commands of agents in sandboxes: what they reach, what ends with them, and what their episode says."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from configs.rollout import SessionsConfig
from configs.sandbox import SandboxConfig
from rollout.environments.sandbox.commands import SandboxedCommands
from rollout.environments.sandbox.programs import shown_for
from rollout.sessions.harness import CommandEnd, CommandHarness, Connection, HarnessError, HarnessTask
from tests.support.machines import wait_until
from tests.support.paths import ROOT
from tests.support.real_clock import on_real_clock
from tests.support.sandboxes import SMALL, need_sandboxes, running

ROOMY = replace(SMALL, cpu_s=60, memory_mb=512)
ASKS = """
import os, socket, sys, urllib.request
other, *ours = sys.argv[1].split(",")
assert sys.stdin.read() == open(os.environ["SLIPSTREAM_PROMPT_FILE"]).read() == "6 times 7?"
print(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"]).read().decode(), os.getcwd(), os.environ["HOME"])
for host in ("127.0.0.1", "192.0.2.1"):
    try:
        socket.create_connection((host, int(other)), timeout=2)
    except OSError:
        continue
    sys.exit(f"another port of {host} was reached")
print([path for path in ours if os.path.exists(path)], "SECRET" in os.environ)
open("made", "w").write("x")
for folder in ("/usr/new", sys.prefix + "/new", os.environ["SLIPSTREAM_PROMPT_FILE"]):
    try:
        open(folder, "w")
    except OSError:
        continue
    sys.exit(folder + " was written")
"""


@pytest.fixture(autouse=True)
def _sandboxes() -> None:
    need_sandboxes()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of ours that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


@asynccontextmanager
async def session() -> AsyncIterator[Connection]:
    """A session that says its path to everyone."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield Connection(session=f"s-{os.getpid()}", url=f"{url}/mine", server_url=url, key="k", agent_key="a")
    finally:
        server.close()


async def run(script: str, config: SandboxConfig = ROOMY, folders: tuple[str, ...] = ()) -> CommandEnd:
    """Run a command as an episode does. Raises HarnessError."""
    ends: list[CommandEnd] = []
    place = SandboxedCommands(config, shown_for(script, folders))
    harness = CommandHarness(script, SessionsConfig(kept_folders=1), ends.append, place)
    async with session() as connection:
        has_failed = True
        try:
            await harness.run(HarnessTask(prompt="6 times 7?", ground_truth="", ordinal=0, index=0), connection)
            has_failed = False
        finally:
            for end in connection.at_end:
                await end(has_failed)
    return ends[0]


def test_a_command_reaches_its_session_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback of the machine is another one, though the address of the session is the same. uvloop is the event
    loop of agent workers."""
    monkeypatch.setenv("SECRET", "of the run")
    (folder / "agent.py").write_text(ASKS)

    async def main() -> CommandEnd:
        async with session() as other:
            port = other.url.rpartition(":")[2].partition("/")[0]
            return await run(f"{sys.executable} {folder}/agent.py {port},{Path.home()}/.cache,{ROOT}/README.md")

    end = uvloop.run(main())
    assert (end.code, end.stderr) == (0, b"")
    assert end.stdout.splitlines() == [b"/mine/v1 /episode/home /episode/home", b"[] False"]


def test_a_daemon_ends_with_its_command_and_nothing_of_the_folder_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    mark = f"daemon-{os.getpid()}"
    daemon = f"env -i setsid nohup sh -c 'while :; do sleep 0.1; done' {mark} >/dev/null 2>&1 &"
    end = asyncio.run(run(f"{daemon} sleep 0.2; ls -d /proc/[0-9]* | wc -l"))
    assert end.code == 0 and int(end.stdout) >= 4, "the daemon was there"
    assert not running(mark) and list(folder.iterdir()) == []


@on_real_clock
async def test_a_command_that_is_cancelled_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    mark = f"cancelled-{os.getpid()}"
    task = asyncio.create_task(run(f"sh -c 'sleep 300; :' {mark}"))
    async with asyncio.timeout(60):
        while not running(mark):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running(mark)


def test_a_command_ends_with_the_agent_worker_that_started_it(folder: Path) -> None:
    mark = f"orphan-{os.getpid()}"
    worker = os.fork()
    if worker == 0:
        try:
            asyncio.run(run(f"sh -c 'sleep 300; :' {mark}"))
        finally:
            os._exit(0)
    try:
        wait_until(lambda: bool(running(mark)))
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    wait_until(lambda: not running(mark))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no more >&2; exit 3", "ended with exit code 3:\nno more"),
        ("no-such-program", "ended with exit code 127:\n.*no-such-program: not found"),
        (f"{sys.executable} -c 'while True: pass'", "ended: used more processor time than sandbox.cpu_s=1"),
        ("dd if=/dev/zero of=big bs=1M count=20", "ended with exit code 153"),
        ("bash -c ':(){ :|:& };:; sleep 8'", "ended: had sandbox.max_processes=32 processes or more"),
    ],
)
def test_an_episode_says_why_its_command_has_failed_and_its_folder_is_kept(
    script: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(HarnessError, match=f"(?s)^rollout.agent_command=.*: .*{why}"):
        asyncio.run(run(f"touch made; {script}", replace(SMALL, cpu_s=1)))
    (kept,) = folder.iterdir()
    assert (kept / "home" / "made").exists() and (kept / "prompt.txt").read_text() == "6 times 7?"


def test_a_sandbox_that_cannot_start_says_so(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="sandbox.backend=bubblewrap: .*no-such-folder"):
        asyncio.run(run("true", folders=(f"{folder}/no-such-folder",)))
