"""Serves an ASGI app on the running event loop, together with the other tasks of that loop."""

import asyncio
import resource
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
from rollout.http.guard import Guard

KEEP_ALIVE_S = 75
"""The seconds that an idle connection stays open: longer than clients keep one (httpx 5 s, aiohttp 15 s), so that they
send no request on a connection that is being closed."""
BACKLOG = 4096
"""The connections that may wait to be accepted: so many harnesses can begin at the same moment, on a busy event loop.
More would wait for seconds, and then be reset. The kernel's net.core.somaxconn may allow fewer."""
OTHER_FILES = 1024
"""The files that a process needs besides those of its connections."""
DEFAULTS = ServeConfig()
CLOSING_S = 1
"""The seconds that requests in flight get at the end. A frozen request would never end by itself."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the process handles its signals itself


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one. Raises ConfigError when the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"serve.host={host}, serve.port={port}: cannot listen there: {error.strerror}") from None


def listener_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: ASGIApp, listener: socket.socket, limits: ServeConfig = DEFAULTS, access: Access | None = None
) -> None:
    """Serve until cancelled. Without `access` everybody who reaches the listener may call.

    uvicorn's `limit_concurrency` is not set: it counts idle connections as well, which clients keep in their pools, and
    answers in plain text. The guard counts the requests under way.
    """
    _allow_files(limits.max_connections)
    config = uvicorn.Config(
        Guard(app, limits, access),
        http="h11",  # httptools has no limit for the size of headers
        h11_max_incomplete_event_size=limits.max_header_bytes,
        log_level="error",  # every bad request of a client would be a warning
        lifespan="off",
        ws="none",
        log_config=None,
        proxy_headers=False,
        access_log=False,
        backlog=BACKLOG,  # asyncio sets the listener's backlog anew
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving


def _allow_files(max_connections: int) -> None:
    """Raise this process's soft limit of open files, which often is 1024, as far as the system allows: each connection
    may need a second one, to a replica."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * max_connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


@asynccontextmanager
async def served(
    app: ASGIApp, listener: socket.socket, limits: ServeConfig = DEFAULTS, access: Access | None = None
) -> AsyncIterator[None]:
    """Serve while the block runs. An error of the server ends the block."""
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(app, listener, limits, access))
        yield
        serving.cancel()


@contextmanager
def linked_socket(link: Path) -> Iterator[socket.socket]:
    """Listen on a Unix socket that only this user can use, and make `link` point to it. Both are removed afterwards.

    The socket lies in a private folder under /tmp, because the path of a Unix socket has at most 107 bytes.
    """
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
