"""Serves the sessions of one process over HTTP: each belongs to an episode that runs there."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from configs.serve import ServeConfig
from rollout.agents.loop import EpisodeTask, GenerateGroup
from rollout.http.server import listen, serve, url_of
from rollout.sessions.app import session_app
from rollout.sessions.backend import PromptRequest, Reward
from rollout.sessions.errors import BadRequestError, SessionEndedError
from rollout.sessions.harness import Connection
from rollout.sessions.keys import SessionKeys
from rollout.sessions.messages import Answer, ChatRequest
from rollout.sessions.session import Session, SessionLimits, Words, summary
from rollout.sessions.transcript import TranscriptClosedError


class SessionHost:
    """A `SessionBackend`: sessions are opened by the episodes of this process, not over HTTP.

    Example:
        async with host.open(task, generate) as (session, connection):
            await harness.run(HarnessTask.of(task.prompt, task.index), connection)
    """

    def __init__(self, words: Words, limits: SessionLimits, model: str, serve_config: ServeConfig, host: str):
        """`host`: address that sessions are served on, at a free port."""
        self.keys = SessionKeys()
        self._words, self._limits, self._model = words, limits, model
        self._serve_config, self._host = serve_config, host
        self._sessions: dict[str, Session] = {}
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

    # -- SessionBackend ------------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        return self._model

    async def create(self, task: Mapping[str, Any]) -> str:
        raise BadRequestError("sessions are opened by the run that trains: rollout.agent or rollout.agent_command")

    async def answer(self, session: str, request: ChatRequest | PromptRequest) -> Sequence[Answer]:
        return await self._of(session).answer(request)

    def delivered(self, session: str, answer_ids: Sequence[str], whole: bool) -> None:
        found = self._sessions.get(session)
        if found is None:
            return  # it ended while the answer was written
        for answer_id in answer_ids:
            found.deliver(answer_id, whole)

    async def count_tokens(self, session: str, request: ChatRequest) -> int:
        return await self._of(session).count_tokens(request)

    async def reward(self, session: str, reward: Reward) -> None:
        try:
            self._of(session).transcript.reward(reward.value, reward.answer_id, reward.metrics)
        except TranscriptClosedError as error:
            raise SessionEndedError(str(error)) from None
        except ValueError as error:
            raise BadRequestError(str(error)) from None

    async def finish(self, session: str) -> None:
        self._of(session).close()

    async def abort(self, session: str) -> None:
        self._of(session).abort()

    async def transcript(self, session: str) -> Mapping[str, Any]:
        return summary(self._of(session))

    def _of(self, session: str) -> Session:
        found = self._sessions.get(session)
        if found is None:
            raise SessionEndedError(f"session {session[:80]} has ended")
        return found


class OneThread:
    """Runs blocking functions one after another, away from the event loop."""

    def __init__(self, name: str):
        self._executor = ThreadPoolExecutor(1, name)

    async def __call__(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
