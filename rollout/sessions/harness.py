"""Runs a harness: a program that talks to the session of its episode over HTTP. It is a user's own async function, or a
command that gets a process per episode."""

import asyncio
import contextlib
import json
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import psutil
from pydantic_core import to_jsonable_python

from configs.runtime.dotted import find
from configs.runtime.environment import PYTHON_PATH
from configs.serve import TOKEN_ENV
from rollout.replica.processes import kill_processes, process_tree
from rollout.rewards.base import RewardResult
from rollout.types import Prompt

logger = logging.getLogger(__name__)
LINE_LIMIT = 2**20
"""Longest line of a command's output, in bytes. A longer one is cut."""
KEPT_LINES = 20
"""Last lines of a command's stderr, for the error that names why it failed."""
END_S = 5.0
"""So long the output of a command that has ended may stay open, since something that it started may hold it, and so
long its processes may take to end once they are killed."""
EXIT_LOOKS_S = 0.02
SESSION_ENV = "SLIPSTREAM_SESSION"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessTask:
    """What a harness is asked to do: a row of the data.

    Example: HarnessTask(prompt="Question: 2 + 2?", ground_truth="4", ordinal=17, index=3)
    """

    prompt: str
    """The text of the prompt, after the template."""
    ground_truth: str
    ordinal: int
    """Place of the prompt in the stream, or in the held-out set."""
    index: int
    """Place of the episode in the prompt's group."""
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

    def to_json(self) -> str:
        """A line for a command. Arrays are lists in it, times and decimals texts, bytes base64.

        Raises:
            HarnessError: a column of the row has something that JSON cannot say.
        """
        for name, value in self.extra.items():
            try:
                json.dumps(value, default=_plain)
            except (TypeError, ValueError) as error:
                raise HarnessError(f"column {name!r} of the data cannot be said as JSON: {error}") from error
        return json.dumps(asdict(self), default=_plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Where a harness finds its session, and the key that opens it."""

    session: str
    url: str
    """Of the session: its routes are below it, such as /v1/chat/completions and /reward."""
    server_url: str
    """Of the server, for a harness whose path is fixed: there the key alone tells the session."""
    key: str

    @property
    def environment(self) -> dict[str, str]:
        """What the SDKs of OpenAI and Anthropic read, and the session itself."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            SESSION_ENV: self.session,
            "SLIPSTREAM_SESSION_URL": self.url,
            "SLIPSTREAM_SESSION_KEY": self.key,
        }


class HarnessError(RuntimeError):
    """The harness failed: its episode has no reward."""


class Harness(Protocol):
    async def run(self, task: HarnessTask, connection: Connection) -> object:
        """Run one episode. Returns its reward: a number, a `RewardResult`, or None if it was posted to the session, or
        is that of rollout.reward. Cancelling it ends all that it has started."""
        ...


AgentFunction = Callable[..., Awaitable[object]]


class FunctionHarness:
    """A user's own `async def agent(task, client)`. `client` is an `openai.AsyncOpenAI` of the session."""

    def __init__(self, path: str, args: Mapping[str, Any] = MappingProxyType({})):
        """`path`: rollout.agent, `args`: rollout.agent_args. Raises ValueError for no async function of these."""
        self._path, self._args = path, args
        self._function: AgentFunction = find("rollout.agent", path, ("task", "client"), named=args)
        if not asyncio.iscoroutinefunction(self._function):
            raise ValueError(f"rollout.agent={path}: must be an async function, one that waits without blocking")

    async def run(self, task: HarnessTask, connection: Connection) -> object:
        # openai asks sys.modules for httpx, and fails on one that another thread, as of verifiers 0.4, yet imports.
        import httpx  # noqa: F401
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # takes a second to import

        # Plain HTTP on this machine: no proxy stands between, and reading the certificates would take 20 ms of CPU.
        http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
        url, key = f"{connection.url}/v1", connection.key
        async with AsyncOpenAI(base_url=url, api_key=key, timeout=None, http_client=http) as client:
            return await self._function(task, client, **self._args)


class CommandHarness:
    """A command of the shell: the task comes as JSON on stdin, the session in the environment.

    Its last line of output may be the reward: a number, or an object with `reward` and maybe `metrics`. Whatever it has
    started is killed when it ends or is cancelled.
    """

    def __init__(self, command: str):
        """`command`: rollout.agent_command."""
        self._command = command

    async def run(self, task: HarnessTask, connection: Connection) -> object:
        """Raises HarnessError when the command exits with another code than 0, or JSON cannot say its task."""
        line = task.to_json()
        process = await asyncio.create_subprocess_shell(
            self._command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={**_inherited(), "PYTHONPATH": PYTHON_PATH, **_no_proxy(), **connection.environment},
            start_new_session=True,
            limit=LINE_LIMIT,
        )
        try:
            return await self._result(process, line)
        finally:
            await _end(process, connection.session)

    async def _result(self, process: Process, task: str) -> object:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        output, errors = deque[str](maxlen=1), deque[str](maxlen=KEPT_LINES)
        streams = (process.stdout, output), (process.stderr, errors)
        readers = [asyncio.create_task(_keep(stream, lines)) for stream, lines in streams]
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read its task
                process.stdin.write(f"{task}\n".encode())
                await process.stdin.drain()
                process.stdin.close()
            code = await _exit_code(process)
            await asyncio.wait(readers, timeout=END_S)
        finally:
            for reader in readers:
                reader.cancel()
        if code:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            said = "".join(errors).strip()
            raise HarnessError(f"rollout.agent_command={self._command}: {how}" + (f":\n{said}" if said else ""))
        return reward_of("".join(output))


def _plain(value: object) -> Any:
    """What `json` does not know, of what files of data have."""
    return to_jsonable_python(value, fallback=_listed, bytes_mode="base64")


def _listed(value: object) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def reward_of(line: str) -> RewardResult | None:
    """The reward that a line of output holds; None for any other text.

    Example: reward_of('{"reward": 1, "metrics": {"steps": 3}}'), reward_of("0.5")
    """
    try:
        found: Any = json.loads(line)
    except ValueError:
        return None
    if isinstance(found, Mapping):
        reward, metrics = found.get("reward"), found.get("metrics", {})
    else:
        reward, metrics = found, {}
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not isinstance(metrics, Mapping):
        return None
    return RewardResult(reward=float(reward), metrics=dict(metrics))


async def _keep(stream: asyncio.StreamReader, lines: deque[str]) -> None:
    """Read a stream to its end, and keep its last lines that are not empty."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than LINE_LIMIT: what was read of it is dropped
            continue
        if not line:
            return
        if text := line.decode("utf-8", "replace").strip():
            lines.append(f"{text}\n")


async def _exit_code(process: Process) -> int:
    """Wait for the end of the process. `process.wait()` would also wait for whoever has inherited its output."""
    while process.returncode is None:
        await asyncio.sleep(EXIT_LOOKS_S)
    return process.returncode


async def _end(process: Process, session: str) -> None:
    """Kill what is left of a command: its process group, its descendants, and whatever has the session in its
    environment, such as a daemon that left both."""
    tree = process_tree(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    kill_processes(tree)
    await _kill_all_of(session)
    await _exit_code(process)


async def _kill_all_of(session: str) -> None:
    """Until a look finds none: one that is being killed may just have started another."""
    try:
        async with asyncio.timeout(END_S):
            while left := await asyncio.to_thread(_of_session, session):
                kill_processes(left)
                await asyncio.sleep(EXIT_LOOKS_S)
    except TimeoutError:
        logger.error("session %s: processes of its harness do not end, although they were killed", session)


def _of_session(session: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(SESSION_ENV) == session:
                found.append(process)
    return found


def _inherited() -> dict[str, str]:
    """The environment of this process, without the token that steers the run: commands may run what a model wrote."""
    return {name: value for name, value in os.environ.items() if name != TOKEN_ENV}


def _no_proxy() -> dict[str, str]:
    """The session is on this machine: no proxy stands between."""
    hosts = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1,localhost"]))
    return {"NO_PROXY": hosts, "no_proxy": hosts}
