"""Serves a replica over HTTP: the control routes, and behind them vLLM's OpenAI-compatible app."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.types import ASGIApp

from configs.schema import PauseMode
from configs.serve import ServeConfig
from rollout.http.access import Access
from rollout.http.control import control_app
from rollout.http.guard import StrictJson
from rollout.http.server import listen, listener_url, serve
from rollout.replica.replica import RolloutReplica
from weight_sync.protocol import ReplicaStatus

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaServer:
    """Starts the HTTP server of a replica, inside its process (`ReplicaHandle.serve`)."""

    limits: ServeConfig
    access: Access

    def start(
        self, replica: RolloutReplica, openai_app: ASGIApp, node_address: str
    ) -> "tuple[str, asyncio.Task[None]]":
        """Return the URL, and the task that serves until it is cancelled. `node_address`: where other machines reach
        this one."""
        listener = listen(LOOPBACK if self.access.on_loopback else node_address, port=0)
        app = replica_app(replica, openai_app)
        return listener_url(listener), asyncio.create_task(serve(app, listener, self.limits, self.access))


def replica_app(replica: RolloutReplica, openai_app: ASGIApp) -> FastAPI:
    """Return the app of one replica. Our /health and /metrics come before vLLM's."""
    app = control_app(ReplicaControl(replica))
    app.mount("", StrictJson(openai_app))
    return app


class ReplicaControl:
    """The control routes' view of one replica, in its own process. Implements `Controlled`."""

    def __init__(self, replica: RolloutReplica):
        self._replica = replica
        self._death = asyncio.create_task(replica.wait_dead())

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout_s: float, by: str) -> None:
        logger.info("pause(%s) by %s", mode.value, by)
        await self._replica.pause(mode, clear_cache, timeout_s)

    async def resume(self, by: str) -> object:
        logger.info("resume by %s", by)
        return await self._replica.resume()

    async def abort(self, names: Collection[str] | None) -> list[str]:
        return await self._replica.abort(names)

    async def is_paused(self) -> bool:
        return self._replica.is_paused()

    async def statuses(self) -> Sequence[ReplicaStatus]:
        return [await self._replica.status()]

    async def stats(self) -> dict[str, dict[str, float]]:
        return {self._replica.name: await self._replica.stats()}

    async def engine_metrics(self) -> dict[str, str]:
        return {self._replica.name: await self._replica.engine_metrics()}

    async def out_of_service(self) -> str | None:
        if self._death.done():
            return f"{self._replica.name} died: {self._death.result()}"
        if (await self._replica.status()).torn:
            return f"the weights of {self._replica.name} are torn by a failed update"
        return None
