"""Tools of a server of the Model Context Protocol (https://modelcontextprotocol.io) as tools of episodes.

rollout.agent_loop=rollout.environments.mcp:agent_loop rollout.agent_args.server.url=http://localhost:8000/mcp
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Unpack
from weakref import WeakKeyDictionary

from configs.runtime.deadline import within
from configs.runtime.environment import user_environment
from configs.serve import TOKEN_ENV
from rollout.agents.chat_turns import ChatTurns
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.tools import ToolEnvironment, ToolResult, capped, no_tool
from rollout.chat.messages import ToolCall, ToolSpec
from rollout.environments.optional import optional
from rollout.environments.turns import STEP_TIMEOUT_S, ToolTurnOptions, check_tool_limits, turns
from rollout.rewards.outcome import described

logger = logging.getLogger(__name__)
KEY = "rollout.agent_args"


# -- a connection ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The way to a server: its standard input and output, or streamable HTTP. It has one of `command` and `url`."""

    command: tuple[str, ...] = ()
    """A program and its arguments. Each connection starts one, which ends with it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the command, besides the environment of the run."""
    url: str = ""
    token_env: str = ""
    """The environment variable that holds the bearer token for the url."""

    def __post_init__(self) -> None:
        """Raise ValueError, which names what is wrong."""
        if bool(self.command) == bool(self.url):
            raise ValueError("needs either command or url")
        if not all(isinstance(word, str) for word in self.command) or isinstance(self.command, str):
            raise ValueError(f"command={self.command}: must be a list of texts, such as [python, my_server.py]")
        if self.token_env and self.token_env not in os.environ:
            raise ValueError(f"token_env={self.token_env}: there is no such environment variable")

    def __str__(self) -> str:
        return f"the MCP server {self.url or ' '.join(self.command)}"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        """Give an open `mcp.Client`, which must be left in the task that has entered it. Raises what mcp does."""
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        from rollout.environments.mcp_stdio import program

        if self.command:
            inherited = {name: value for name, value in user_environment().items() if name != TOKEN_ENV}
            async with Client(program(self.command, {**inherited, **self.env})) as client:
                yield client
            return
        headers = {"Authorization": f"Bearer {os.environ[self.token_env]}"} if self.token_env else {}
        timeout = httpx2.Timeout(30.0, read=None)  # how long an answer may take is said with every call
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits) as http,
            Client(streamable_http_client(self.url, http_client=http)) as client,
        ):
            yield client


class Connection:
    """One client session. It lives in a task of its own, because a session of mcp must end in the task where it began,
    and takes that with it when the connection is lost."""

    def __init__(self, server: Server):
        self._server = server
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """True once the connection was open and is of no use any more."""
        return self._is_lost

    async def open(self) -> list[ToolSpec]:
        """Connect, and return the tools of the server. Raises ConnectionError."""
        opened: asyncio.Future[list[ToolSpec]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(opened))
        return await opened

    async def _run(self, opened: asyncio.Future[list[ToolSpec]]) -> None:
        try:
            async with self._server.client() as client:
                specs = await _list_tools(client)
                self._client = client
                if not opened.done():
                    opened.set_result(specs)
                await self._ending.wait()
        except Exception as error:
            if opened.done():
                logger.warning("%s: the connection is lost", self._server, exc_info=error)
            else:
                opened.set_exception(ConnectionError(f"{self._server}: {described(_innermost(error))}"))
        finally:
            self._is_lost = True
            opened.cancel()

    async def close(self) -> None:
        """End the session, and the process of a command."""
        self._ending.set()
        if self._task is not None:
            if self._client is None:
                self._task.cancel()
            await asyncio.wait({self._task})

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> tuple[str, bool]:
        """Return the text of a tool's result, and whether it is an error.

        Raises:
            TimeoutError: There was no result for `timeout_s` seconds.
            ConnectionError: The connection is lost, or the server failed.
            MCPError: The server refuses the call.
            RuntimeError: The result is not what the tool's schema says.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST, PARSE_ERROR, REQUEST_TIMEOUT

        try:
            result = await self._client.call_tool(name, arguments, read_timeout_seconds=timeout_s)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise TimeoutError from error
            self._is_lost |= error.code in (CONNECTION_CLOSED, INVALID_REQUEST)  # the latter after a restart
            if self._is_lost or error.code in (INTERNAL_ERROR, PARSE_ERROR):
                raise ConnectionError(f"{self._server}: {described(error)}") from error
            raise
        except Exception as error:
            if self._is_lost:
                raise ConnectionError(f"{self._server}: the connection is lost: {described(error)}") from error
            raise
        return _join_text(result), result.is_error


async def _list_tools(client: Any) -> list[ToolSpec]:
    specs: list[ToolSpec] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        specs += [
            ToolSpec(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if cursor is None:
            return specs


def _join_text(result: Any) -> str:
    """Return the texts of a result, each on its own lines. A result without any is shown as its structured content."""
    from mcp.types import EmbeddedResource, TextContent, TextResourceContents
    from pydantic_core import to_json

    parts: list[str] = []
    for part in result.content:
        match part:
            case TextContent(text=text) | EmbeddedResource(resource=TextResourceContents(text=text)):
                parts.append(text)
            case _:
                parts.append(f"[{part.type} that cannot be shown]")
    if not parts and result.structured_content is not None:
        return to_json(result.structured_content).decode()
    return "\n".join(parts)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# -- the tools of an episode -------------------------------------------------------------------------------------------


class McpTools:
    """The tools of a server over one connection."""

    def __init__(self, server: Server, specs: Sequence[ToolSpec], call_timeout_s: float, max_output_chars: int):
        """`specs`: the tools that the policy is shown."""
        self._server, self._specs = server, tuple(specs)
        self._call_timeout_s, self._max_output_chars = call_timeout_s, max_output_chars
        self._connection = Connection(server)

    @property
    def is_lost(self) -> bool:
        return self._connection.is_lost

    def specs(self) -> tuple[ToolSpec, ...]:
        return self._specs

    async def open(self) -> None:
        """Connect. Raises ConnectionError where there is no server, or one with other tools than the policy is
        shown."""
        there = await self._connection.open()
        changed = [spec.name for spec in self._specs if spec not in there]
        if changed:
            raise ConnectionError(f"{self._server}: the run began with other tools: {', '.join(changed)}")

    async def close(self) -> None:
        await self._connection.close()

    async def result(self, call: ToolCall) -> ToolResult:
        """Run a call. What the tool or the server refuses is a result that the policy reads, and so is that it takes
        longer than `call_timeout_s`. Raises ConnectionError when the server fails, or the connection is lost."""
        names = [spec.name for spec in self._specs]
        if call.name not in names:
            return self._error(no_tool(call.name, names))
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError) as error:
            return self._error(f"the arguments of {call.name} are wrong: Invalid JSON: {error}")
        if not isinstance(arguments, dict):
            return self._error(f"the arguments of {call.name} are wrong: they must be an object")
        try:
            text, is_error = await self._connection.call(call.name, arguments, self._call_timeout_s)
        except ConnectionError:
            raise
        except TimeoutError:
            return self._error(f"the tool {call.name} took longer than call_timeout_s={self._call_timeout_s}")
        except Exception as error:
            return self._error(described(error))
        return self._error(text) if is_error else capped(text, self._max_output_chars)

    def _error(self, text: str) -> ToolResult:
        return capped(f"Error: {text}", self._max_output_chars, is_error=True)


class OwnTools(ToolEnvironment):
    """An episode with a connection of its own. The server may keep a state: calls run one after another."""

    def __init__(self, tools: McpTools):
        super().__init__(tools, in_order=True)
        self._own = tools

    async def reset(self) -> str:
        await self._own.open()
        return ""

    async def close(self) -> None:
        await self._own.close()


class SharedTools(ToolEnvironment):
    """An episode that shares its connection with the others of its agent worker."""

    def __init__(self, shared: "Shared"):
        super().__init__(shared)
        self._shared = shared

    async def reset(self) -> str:
        await self._shared.opened()
        return ""


class Shared:
    """Tools over one connection, which is opened when it is needed, and anew after it was lost."""

    def __init__(self, make: Callable[[], McpTools], open_timeout_s: float):
        """`open_timeout_s`: the deadline of connecting, which step_timeout_s sets."""
        self._make, self._open_timeout_s = make, open_timeout_s
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[McpTools]] = WeakKeyDictionary()
        """The connection of each event loop: it lives only on the one that has opened it."""

    def specs(self) -> tuple[ToolSpec, ...]:
        return self._make().specs()

    async def result(self, call: ToolCall) -> ToolResult:
        return await (await self.opened()).result(call)

    async def opened(self) -> McpTools:
        loop = asyncio.get_running_loop()
        opening = self._open.get(loop)
        if opening is None or (opening.done() and _is_useless(opening)):
            opening = self._open[loop] = loop.create_task(self._opened())
        return await asyncio.shield(opening)  # an episode that is cancelled leaves the others their connection

    async def close(self) -> None:
        """Close the connection of the event loop that this is called on."""
        opening = self._open.pop(asyncio.get_running_loop(), None)
        if opening is not None:
            await asyncio.wait([opening])
            if not _is_useless(opening):
                await opening.result().close()

    async def _opened(self) -> McpTools:
        tools = self._make()
        try:
            async with within(self._open_timeout_s, "step_timeout_s", "connecting with an MCP server"):
                await tools.open()
        except BaseException:
            await tools.close()
            raise
        return tools


def _is_useless(opening: asyncio.Task[McpTools]) -> bool:
    return opening.cancelled() or opening.exception() is not None or opening.result().is_lost


# -- the loop ----------------------------------------------------------------------------------------------------------


def agent_loop(
    tokenizer: Any,
    *,
    server: Mapping[str, Any],
    tools: Sequence[str] = (),
    shared: bool = False,
    call_timeout_s: float = 30.0,
    max_output_chars: int = 8192,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    **options: Unpack[ToolTurnOptions],
) -> MultiTurn:
    """Make the agent loop of rollout.agent_args. The server is asked for its tools here, before there are episodes.

    Args:
        tokenizer: The tokenizer of transformers, with a chat template that shows tools.
        server: The fields of a `Server`: `command` and perhaps `env`, or `url` and perhaps `token_env`.
        tools: The names of the tools that the policy is shown; without any, all.
        shared: True for a server without a state: the episodes of an agent worker share one connection. Else each
            episode has its own, and with a command its own process.
        call_timeout_s: The deadline of each call.
        max_output_chars: The characters of a result that the policy reads.
        tool_parser: The parser of calls, as in sessions.tool_parser.
        reasoning_parser: The parser of reasoning, as in sessions.reasoning_parser.

    Raises:
        ImportError: There is no mcp.
        ValueError: An argument is wrong, or the server does not answer, or has no such tools.
    """
    optional("mcp.client.client", "'mcp>=2'")
    check_tool_limits(call_timeout_s, max_output_chars, options)
    open_timeout_s = options.get("step_timeout_s", STEP_TIMEOUT_S)
    address = _server(server)
    specs = _chosen(_listed(address, open_timeout_s), tools)

    def make_tools() -> McpTools:
        return McpTools(address, specs, call_timeout_s, max_output_chars)

    chat = ChatTurns(tokenizer, specs, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    if not shared:
        return turns(lambda prompt: OwnTools(make_tools()), tokenizer, options, chat)
    shared_tools = Shared(make_tools, open_timeout_s)
    loop = turns(lambda prompt: SharedTools(shared_tools), tokenizer, options, chat)
    return replace(loop, closes=(shared_tools.close,))


def _server(values: Mapping[str, Any]) -> Server:
    known = Server.__dataclass_fields__
    for name in values:
        if name not in known:
            raise ValueError(f"{KEY}.server.{name}: must be one of {', '.join(known)}")
    fields = dict(values)
    if isinstance(command := fields.get("command"), Sequence) and not isinstance(command, str):
        fields["command"] = tuple(command)
    try:
        return Server(**fields)
    except ValueError as error:
        raise ValueError(f"{KEY}.server={dict(values)}: {error}") from error


def _listed(server: Server, timeout_s: float) -> list[ToolSpec]:
    """Return the tools of the server, also where an event loop runs already. Raises ValueError."""

    async def look() -> list[ToolSpec]:
        connection = Connection(server)
        try:
            async with within(timeout_s, "step_timeout_s", f"connecting with {server}"):
                return await connection.open()
        finally:
            await connection.close()

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(asyncio.run, look()).result()
        except (ConnectionError, TimeoutError) as error:
            raise ValueError(f"{KEY}.server: {error}") from error


def _chosen(specs: Sequence[ToolSpec], names: Sequence[str]) -> list[ToolSpec]:
    there = {spec.name: spec for spec in specs}
    for name in names:
        if name not in there:
            raise ValueError(f"{KEY}.tools={list(names)}: there is no {name}; the server has {', '.join(there)}")
    if not there:
        raise ValueError(f"{KEY}.server: the server has no tools")
    return [there[name] for name in names or there]
