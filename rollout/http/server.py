"""Serves an ASGI app on the running event loop, together with the other tasks of that loop."""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from configs.serve import ServeConfig
from configs.validate import ConfigError
from rollout.http.access import Access
from rollout.http.connections import SPARE, Connections, LimitedConfig, LimitedProtocol, affordable
from rollout.http.guard import Guard

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than clients keep one (httpx 5 s, aiohttp 15 s), so that
they send no request on a connection that is being closed."""
BACKLOG = 4096
"""Connections that may wait to be accepted: so many harnesses can begin at the same moment, on a busy event loop. More
would wait for seconds, and then be reset. The kernel's net.core.somaxconn may allow fewer."""
DEFAULTS = ServeConfig()
CLOSING_S = 1
"""Seconds that requests in flight get at the end. A frozen request would never end by itself."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the process handles its signals itself


class _Listener(socket.socket):
    """Keeps its backlog. asyncio would set it to the number of connections that it accepts at a time."""

    def listen(self, backlog: int = BACKLOG, /) -> None:
        super().listen(BACKLOG)


def listen(host: str, port: int) -> socket.socket:
    """Port 0 takes a free port. Raises ConfigError when the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return _Listener(fileno=socket.create_server((host, port), family=family, backlog=BACKLOG).detach())
    except OSError as error:
        raise ConfigError(f"serve.host={host}, serve.port={port}: cannot listen there: {error.strerror}") from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: ASGIApp, listener: socket.socket, limits: ServeConfig = DEFAULTS, access: Access | None = None
) -> None:
    """Serves until it is cancelled. Without `access` everybody may call who reaches the listener."""
    maximum = affordable(limits.max_connections)
    config = LimitedConfig(
        Guard(app, limits, access, maximum),
        http=LimitedProtocol,
        log_level="error",  # every bad request of a client would be a warning
        lifespan="off",
        ws="none",
        log_config=None,
        proxy_headers=False,
        access_log=False,
        backlog=SPARE,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
    config.connections = Connections(limits, maximum)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def served(
    app: ASGIApp, listener: socket.socket, limits: ServeConfig = DEFAULTS, access: Access | None = None
) -> AsyncIterator[None]:
    """Serves while the block runs. An error of the server ends the block."""
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(app, listener, limits, access))
        yield
        serving.cancel()


@contextmanager
def linked_socket(link: Path) -> Iterator[socket.socket]:
    """Listen on a Unix socket that only this user can use, and make `link` point to it: the path of one has at most
    107 bytes, so it lies in a private folder under /tmp. Both are removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slipstream-", dir="/tmp"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            path = folder / "socket"
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen()
            link.unlink(missing_ok=True)
            link.symlink_to(path)
            yield listener
        finally:
            link.unlink(missing_ok=True)
            shutil.rmtree(folder)
