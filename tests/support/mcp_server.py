"""A real MCP server: over its standard input and output, or with a port as argument over streamable HTTP."""

import os
import sys
import time
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent

server = MCPServer("numbers", log_level="ERROR")
calls: list[str] = []


@server.tool()
def power(base: int, exponent: int = 2) -> int:
    """Raise a number to a power."""
    return base**exponent


@server.tool()
def note(text: str) -> str:
    """Keep a text, and say all that were kept by this process."""
    calls.append(text)
    return " ".join(calls)


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"


@server.tool(structured_output=False)
def parts() -> list[Any]:
    """Several parts."""
    image = ImageContent(data="", mime_type="image/png")
    return [TextContent(text="one"), image, TextContent(text="two")]


@server.tool()
def variable(name: str) -> str:
    """Say a variable of the environment."""
    return os.environ.get(name, "none")


@server.tool()
def crash() -> str:
    """End the process."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
