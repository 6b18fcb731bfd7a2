"""Serves the sessions of one process over HTTP: each belongs to an episode that runs there."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from configs.serve import ServeConfig
from rollout.agents.loop import EpisodeTask, GenerateGroup
from rollout.http.server import listen, serve, url_of
from rollout.sessions.app import session_app
from rollout.sessions.errors import BadRequestError
from rollout.sessions.harness import Connection
from rollout.sessions.open_sessions import OpenSessions
from rollout.sessions.session import Session, SessionLimits, Words


class SessionHost(OpenSessions):
    """Sessions are opened by the episodes of this process, not over HTTP.

    Example:
        async with host.open(task, generate) as (session, connection):
            await harness.run(HarnessTask.of(task.prompt, task.index), connection)
    """

    def __init__(self, words: Words, limits: SessionLimits, model: str, serve_config: ServeConfig, host: str):
        """`host`: address that sessions are served on, at a free port."""
        super().__init__(model)
        self._words, self._limits = words, limits
        self._serve_config, self._host = serve_config, host
        self._server: asyncio.Task[None] | None = None
        self._url = ""

    @asynccontextmanager
    async def open(self, task: EpisodeTask, generate: GenerateGroup) -> AsyncIterator[tuple[Session, Connection]]:
        """A session, which ends with the block: what it has under way is cancelled, its key is worth nothing."""
        await self._started()
        name = f"{task.request_id}-{secrets.token_hex(4)}".replace(".", "_")
        session = Session(task, generate, self._words, self._limits)
        self._sessions[name] = session
        url = f"{self._url}/sessions/{name}"
        try:
            yield session, Connection(session=name, url=url, server_url=self._url, key=self.keys.issue(name))
        finally:
            self.keys.revoke(name)
            del self._sessions[name]
            session.close()

    async def _started(self) -> None:
        if self._server is not None and not self._server.done():
            return
        listener = listen(self._host, 0)
        self._url = url_of(listener)
        app = session_app(self, self.keys)
        self._server = asyncio.create_task(serve(app, listener, self._serve_config), name="sessions")

    async def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._server

    async def create(self, task: Mapping[str, Any]) -> str:
        raise BadRequestError("sessions are opened by the run that trains: rollout.agent or rollout.agent_command")
