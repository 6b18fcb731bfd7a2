"""A connection with a server of the Model Context Protocol, by the `mcp` package."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from configs.runtime.environment import PYTHON_PATH
from configs.serve import TOKEN_ENV
from rollout.rewards.outcome import described
from rollout.sessions.messages import ToolSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How a server is reached: by its standard input and output, or by streamable HTTP. It has one of `command` and
    `url`."""

    command: tuple[str, ...] = ()
    """A program and its arguments. Each connection starts one, which ends with it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """For the command, besides the environment of the run."""
    url: str = ""
    token_env: str = ""
    """For the url: the environment variable that holds its bearer token."""

    def __post_init__(self) -> None:
        """Raises ValueError, which names what is wrong."""
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
        """An open `mcp.Client`. It must be left in the task that has entered it. Raises what mcp does."""
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        if self.command:
            program, *arguments = self.command
            inherited = {name: value for name, value in os.environ.items() if name != TOKEN_ENV}
            env = {**inherited, "PYTHONPATH": PYTHON_PATH, **self.env}
            async with Client(StdioServerParameters(command=program, args=arguments, env=env)) as client:
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
    """One client session, in a task of its own: mcp's must end in the task where they began, and take that with them
    when the connection is lost."""

    def __init__(self, server: Server):
        self._server = server
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether it was open, and is of no use any more."""
        return self._is_lost

    async def open(self) -> list[ToolSpec]:
        """The tools of the server. Raises ConnectionError."""
        opened: asyncio.Future[list[ToolSpec]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(opened))
        return await opened

    async def _run(self, opened: asyncio.Future[list[ToolSpec]]) -> None:
        try:
            async with self._server.client() as client:
                specs = await _specs_of(client)
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
        """End it, and the process of a command."""
        self._ending.set()
        if self._task is not None:
            if self._client is None:
                self._task.cancel()
            await asyncio.wait({self._task})

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> tuple[str, bool]:
        """The text of a tool's result, and whether it is an error.

        Raises:
            TimeoutError: there was no result for `timeout_s` seconds.
            ConnectionError: the connection is lost, or the server failed.
            MCPError: the server refuses the call.
            RuntimeError: the result is not what the tool's schema says.
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
        return _text_of(result), result.is_error


async def _specs_of(client: Any) -> list[ToolSpec]:
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


def _text_of(result: Any) -> str:
    """The texts of a result, each on its own lines. A result without any is shown as its structured content."""
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
