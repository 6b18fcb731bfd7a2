"""Tools of a server of the Model Context Protocol (https://modelcontextprotocol.io) as tools of episodes.

rollout.agent_loop=rollout.environments.mcp:agent_loop rollout.agent_args.server.url=http://localhost:8000/mcp
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Unpack
from weakref import WeakKeyDictionary

from configs.runtime.deadline import within
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.tools import ToolEnvironment, ToolResult, capped, no_tool
from rollout.environments.mcp_connection import Connection, Server
from rollout.environments.optional import optional
from rollout.environments.turns import STEP_TIMEOUT_S, ToolTurnOptions, check_tool_limits, tool_turns
from rollout.rewards.outcome import described
from rollout.sessions.chat_turns import ChatTurns
from rollout.sessions.messages import ToolCall, ToolSpec

KEY = "rollout.agent_args"


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
        """Raises ConnectionError where there is no server, or one with other tools than the policy is shown."""
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
        except ValueError as error:
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
        """`open_timeout_s`: step_timeout_s, which names it."""
        self._make, self._open_timeout_s = make, open_timeout_s
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[McpTools]] = WeakKeyDictionary()
        """A connection lives on the event loop that has opened it."""

    def specs(self) -> tuple[ToolSpec, ...]:
        return self._make().specs()

    async def result(self, call: ToolCall) -> ToolResult:
        return await (await self.opened()).result(call)

    async def opened(self) -> McpTools:
        loop = asyncio.get_running_loop()
        opening = self._open.get(loop)
        if opening is None or (opening.done() and _is_useless(opening)):
            opening = self._open[loop] = loop.create_task(self._opened())
        return await asyncio.shield(opening)  # others wait for it, too

    async def close(self) -> None:
        """Of the event loop that it is called on."""
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
    """Arguments are those of rollout.agent_args. The server is asked for its tools here, before there are episodes.

    Args:
        tokenizer: Of transformers, with a chat template that shows tools.
        server: The fields of a `Server`: `command` and perhaps `env`, or `url` and perhaps `token_env`.
        tools: The names of those that the policy is shown; none are all.
        shared: Whether the episodes of an agent worker share one connection. It is for servers without a state. Else
            each episode has its own, and with a command its own process.
        call_timeout_s: Of each call.
        max_output_chars: Of each result; of a longer one the policy reads the beginning.
        tool_parser: As sessions.tool_parser.
        reasoning_parser: As sessions.reasoning_parser.

    Raises:
        ImportError: There is no mcp.
        ValueError: An argument is wrong, or the server does not answer, or has no such tools.
    """
    optional("mcp.client.client", "'mcp>=2'")
    check_tool_limits(call_timeout_s, max_output_chars, options)
    open_timeout_s = options.get("step_timeout_s", STEP_TIMEOUT_S)
    found = _server(server)
    specs = _chosen(_listed(found, open_timeout_s), tools)

    def make_tools() -> McpTools:
        return McpTools(found, specs, call_timeout_s, max_output_chars)

    one = Shared(make_tools, open_timeout_s) if shared else None
    chat = ChatTurns(tokenizer, specs, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    loop = tool_turns(
        lambda prompt: OwnTools(make_tools()) if one is None else SharedTools(one), tokenizer, chat, options
    )
    return loop if one is None else replace(loop, closes=(one.close,))


def _server(given: Mapping[str, Any]) -> Server:
    known = Server.__dataclass_fields__
    for name in given:
        if name not in known:
            raise ValueError(f"{KEY}.server.{name}: must be one of {', '.join(known)}")
    fields = dict(given)
    if isinstance(command := fields.get("command"), Sequence) and not isinstance(command, str):
        fields["command"] = tuple(command)
    try:
        return Server(**fields)
    except ValueError as error:
        raise ValueError(f"{KEY}.server={dict(given)}: {error}") from error


def _listed(server: Server, timeout_s: float) -> list[ToolSpec]:
    """The tools of the server, also where an event loop runs already. Raises ValueError."""

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
