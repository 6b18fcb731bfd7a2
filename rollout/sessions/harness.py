"""Harnesses: programs that talk to the session of their episode over HTTP. A harness is a user's own async function, or
a command that gets a process per episode."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import psutil

from configs.named_agents import NamedAgent
from configs.rollout import PROMPT_PLACEHOLDER, SessionsConfig
from configs.runtime.dotted import find
from configs.runtime.environment import user_environment
from configs.serve import TOKEN_ENV
from rollout.actors.child_process import ChildProcess
from rollout.actors.processes import kill_processes, process_tree
from rollout.sessions.containment import exits_contained
from rollout.sessions.folders import EpisodeFolder, EpisodeFolders, as_bytes
from rollout.types import Prompt

T = TypeVar("T")
logger = logging.getLogger(__name__)
REAPER = str(Path(__file__).with_name("reaper.py"))
DEFAULTS = SessionsConfig()
PROMPT_VARIABLE = "slipstream_prompt"
"""The variable of the shell, not of the environment, that holds the prompt. The prompt is never part of the script: no
text of a data set can end a quotation there."""
PROMPT_FILE_ENV = "SLIPSTREAM_PROMPT_FILE"
SESSION_ENV = "SLIPSTREAM_SESSION"
HOME_FOLDERS = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
"""Variables that name folders of the user's home, which by default are below HOME."""
PIECE_BYTES = 2**16
KEPT_BYTES = 2**14
"""The last bytes of each stream of a command that are kept with its folder."""
KEPT_LINES = 20
"""The last lines of a command's stderr that an error repeats."""
END_S = 5.0
"""The seconds that a command's processes may take to end once they are killed, and its output after them."""
EXIT_LOOKS_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessTask:
    """The task of a harness, which is a row of the data. A function of the user gets all of it, a command only the
    prompt: what a command is told, the policy may read.

    Example: HarnessTask(prompt="Question: 2 + 2?", ground_truth="4", ordinal=17, index=3)
    """

    prompt: str
    """The text of the prompt, with the template."""
    ground_truth: str
    ordinal: int
    """The place of the prompt in the stream, or in the held-out set."""
    index: int
    """The place of the episode in the prompt's group."""
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other columns of the row."""

    @classmethod
    def of(cls, prompt: Prompt, index: int) -> "HarnessTask":
        return cls(
            prompt=prompt.text,
            ground_truth=prompt.ground_truth,
            ordinal=prompt.ordinal,
            index=index,
            data_source=prompt.data_source,
            extra=prompt.extra,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A session as the harness of its episode knows it: its address, the keys that open it, and what is to be done when
    the episode has ended."""

    session: str
    url: str
    """The URL of the session, below which its routes are, such as /v1/chat/completions and /reward."""
    server_url: str
    """The URL of the server, for a harness whose path is fixed: there the key alone tells the session."""
    key: str
    """The key that opens all of the session, rewards too."""
    agent_key: str
    """A key that opens the session, but posts no rewards: for commands, whose environment the policy may read."""
    at_end: list[Callable[[bool], Awaitable[None]]] = field(default_factory=list)
    """Functions that are awaited when the episode has ended, with true if it has failed."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the SDKs of OpenAI and Anthropic read, and the session's own."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": self.agent_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.agent_key,
            SESSION_ENV: self.session,
            "SLIPSTREAM_SESSION_URL": self.url,
            "SLIPSTREAM_SESSION_KEY": self.agent_key,
        }


class HarnessError(RuntimeError):
    """The harness failed: its episode has no reward."""


class Harness(Protocol):
    async def run(self, task: HarnessTask, connection: Connection) -> object:
        """Run one episode and return its reward: a number, a `RewardResult`, or None if it was posted to the session or
        is left to rollout.reward. Cancelling it ends all that it has started."""
        ...


AgentFunction = Callable[..., Coroutine[Any, Any, object]]


class FunctionHarness:
    """Runs a user's own `async def agent(task, client)`, where `client` is an `openai.AsyncOpenAI` of the session."""

    def __init__(self, path: str, args: Mapping[str, Any] = MappingProxyType({})):
        """`path` is rollout.agent, `args` is rollout.agent_args. Raises ValueError unless they are an async function
        and its arguments."""
        self._path, self._args = path, args
        self._function: AgentFunction = find("rollout.agent", path, ("task", "client"), named=args)
        if not asyncio.iscoroutinefunction(self._function):
            raise ValueError(f"rollout.agent={path}: must be an async function, one that waits without blocking")

    async def run(self, task: HarnessTask, connection: Connection) -> object:
        # openai looks for httpx in sys.modules, and fails if another thread is still importing it there: verifiers 0.4
        # has such a thread. So httpx is imported whole first.
        import httpx  # noqa: F401
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # takes a second to import

        # The session is plain HTTP on this machine: no proxy stands between, and reading the certificates would take
        # 20 ms of CPU for every episode.
        http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
        url, key = f"{connection.url}/v1", connection.key
        async with AsyncOpenAI(base_url=url, api_key=key, timeout=None, http_client=http) as client:
            with exits_contained():  # of a task of its own, and those that it makes
                running = asyncio.create_task(self._function(task, client, **self._args))
            return await running


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """The end of a command."""

    code: int | None
    """The exit code, or -N after signal N; None where the command did not end by itself."""
    stdout: bytes
    stderr: bytes
    """`stdout` and `stderr`: the last bytes that it has written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """A command of one episode, that is to be started."""

    script: str
    """Text for the shell. It gets `argument` as its first argument."""
    argument: bytes
    folder: EpisodeFolder
    connection: Connection
    variables: Mapping[str, str]
    """The variables of its environment that are the same wherever it runs."""


CommandPlace = Callable[[AgentCommand], Awaitable[tuple[ChildProcess, int]]]
"""Starts a command in the place where commands run. Returns the process, whose streams are pipes, and a descriptor
which, when it is closed, ends all that the command has started. Raises OSError and ValueError for a command that the
system does not take. That of sandboxes is above this room (rollout/environments/sandbox/commands.py)."""


async def start_here(command: AgentCommand) -> tuple[ChildProcess, int]:
    """Start a command without a sandbox: on this machine, with the rights of this process."""
    # Without the token that steers the run, since commands may run what a model wrote.
    environment = {name: value for name, value in user_environment().items() if name != TOKEN_ENV}
    if command.folder.home is not None:
        environment = {name: value for name, value in environment.items() if name not in HOME_FOLDERS}
        environment["HOME"] = str(command.folder.home)
    environment |= {PROMPT_FILE_ENV: str(command.folder.prompt), **command.variables}
    watched, control = os.pipe()
    try:
        process = await ChildProcess.start(
            *(sys.executable, "-I", "-S", REAPER, str(watched), command.script, command.argument),
            cwd=command.folder.home,
            env=environment,
            pass_fds=(watched,),
            start_new_session=True,  # a process group of its own, which `_end` kills
        )
    except BaseException:
        os.close(control)
        raise
    finally:
        os.close(watched)
    return process, control


class CommandHarness:
    """Runs a command of the shell, which gets the prompt, and the session in its environment.

    The prompt is plain text on stdin and in the file SLIPSTREAM_PROMPT_FILE. In the command, `{prompt}` stands for it,
    quoted; stdin is then empty, because agents append it to the prompt that is an argument. Nothing that the command
    prints is a reward: what an agent prints last, the policy has written. Whatever the command has started is killed
    when it ends or is cancelled.
    """

    def __init__(
        self,
        command: str | NamedAgent,
        config: SessionsConfig = DEFAULTS,
        on_end: Callable[[CommandEnd], None] = lambda end: None,
        place: CommandPlace = start_here,
    ):
        """`command` is rollout.agent_command, or the agent that rollout.agent names. `on_end` is told how each command
        has ended. `place` starts them, where they run."""
        self._named = command if isinstance(command, NamedAgent) else None
        if isinstance(command, NamedAgent):
            self._key, command = f"rollout.agent={command.name}", command.command
        else:
            self._key = f"rollout.agent_command={command}"
        self._command, self._may_reward, self._on_end = command, config.command_reward, on_end
        self._place = place
        self._script = f"{PROMPT_VARIABLE}=$1; shift\n" + command.replace(PROMPT_PLACEHOLDER, f'"${PROMPT_VARIABLE}"')
        self._folders = EpisodeFolders(config)

    async def run(self, task: HarnessTask, connection: Connection) -> None:
        """Run the command. Raises HarnessError when it cannot be started or exits with another code than 0."""
        files = {} if self._named is None else self._named.written_files(connection.environment)
        making = self._folders.make(task.prompt, files)
        folder = await _whole(making, lambda made: self._folders.end(made, has_failed=False))
        connection.at_end.append(lambda has_failed: self._folders.end(folder, has_failed))
        prompt, is_argument = as_bytes(task.prompt), PROMPT_PLACEHOLDER in self._command
        starting = self._start(prompt if is_argument else b"", folder, connection)
        process, control = await _whole(starting, lambda started: _end(*started, connection.session))
        reading = _Streams(process, b"" if is_argument else prompt)
        code: int | None = None
        try:
            code = await process.wait()
        finally:
            await _end(process, control, connection.session)
            await reading.end()
            folder.stdout, folder.stderr = bytes(reading.stdout), bytes(reading.stderr)
            self._on_end(CommandEnd(code=code, stdout=folder.stdout, stderr=folder.stderr))
        if code:
            raise HarnessError(f"{self._key}: {_why(code, folder.stderr)}")

    async def _start(self, argument: bytes, folder: EpisodeFolder, connection: Connection) -> tuple[ChildProcess, int]:
        command = AgentCommand(
            script=self._script,
            argument=argument,
            folder=folder,
            connection=connection,
            variables=self._variables(connection),
        )
        try:
            return await self._place(command)
        except (OSError, ValueError) as error:  # an argument of the system is too long, or has a NUL
            why = f"{error}: prompts of {len(argument):,} bytes may need stdin in place of {PROMPT_PLACEHOLDER}"
            raise HarnessError(f"{self._key}: cannot be started: {why}") from error

    def _variables(self, connection: Connection) -> dict[str, str]:
        """Return the variables of a command, wherever it runs: no proxy stands before the session, which is on this
        machine."""
        hosts = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1,localhost"]))
        own = {"NO_PROXY": hosts, "no_proxy": hosts}
        if self._may_reward:
            own |= {"SLIPSTREAM_REWARD_URL": f"{connection.url}/reward", "SLIPSTREAM_REWARD_KEY": connection.key}
        agent = {} if self._named is None else self._named.environment
        return {**own, **agent, **connection.environment}


class _Streams:
    """Writes the prompt, and reads what a command writes, whose last bytes it keeps."""

    def __init__(self, process: ChildProcess, prompt: bytes):
        self.stdout, self.stderr = bytearray(), bytearray()
        self._stdin = process.stdin
        self._writing = asyncio.create_task(self._write(prompt))
        streams = (process.stdout, self.stdout), (process.stderr, self.stderr)
        self._reading = [asyncio.create_task(self._keep_end(stream, kept)) for stream, kept in streams]

    async def _write(self, prompt: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a command need not read its prompt
            self._stdin.write(prompt)
            await self._stdin.drain()
        self._stdin.close()

    async def _keep_end(self, stream: asyncio.StreamReader, kept: bytearray) -> None:
        """Read a stream to its end. It is read in pieces: a flood of short lines would hold the event loop."""
        while piece := await stream.read(PIECE_BYTES):
            kept += piece
            del kept[:-KEPT_BYTES]

    async def end(self) -> None:
        """Read the rest, once nothing writes any more."""
        await asyncio.wait(self._reading, timeout=END_S)
        for task in (self._writing, *self._reading):
            task.cancel()
        self._stdin.close()


def _why(code: int, stderr: bytes) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = stderr.decode("utf-8", "replace").strip().splitlines()[-KEPT_LINES:]
    return "\n".join([how + (":" if lines else ""), *lines])


async def _whole(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[object]]) -> T:
    """Return the result of the work. If the caller is cancelled meanwhile, let the work finish and undo it, because
    nobody else knows what it has made."""
    working = asyncio.create_task(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        if not working.cancelled() and working.exception() is None:
            await undo(working.result())
        raise


async def _end(process: ChildProcess, control: int, session: str) -> None:
    """Return when nothing is left of a command. Its reaper ends what the command has started, as soon as `control` is
    closed; where the command has stopped or killed that, its process group, its descendants and every process that has
    the session in its environment are killed here."""
    os.close(control)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2 * END_S):
            await process.wait()
    tree = process_tree(process.pid) if process.returncode is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    kill_processes(tree)
    try:
        async with asyncio.timeout(END_S):
            # Until a look finds none: a process that is being killed may just have started another.
            while processes := await asyncio.to_thread(_find_processes, session):
                kill_processes(processes)
                await asyncio.sleep(EXIT_LOOKS_S)
    except TimeoutError:
        logger.error("session %s: processes of its harness do not end, although they were killed", session)
    await process.wait()


def _find_processes(session: str) -> list[psutil.Process]:
    processes: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(SESSION_ENV) == session:
                processes.append(process)
    return processes
