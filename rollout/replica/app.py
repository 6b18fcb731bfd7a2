"""What a replica serves over HTTP: the control routes, and behind them vLLM's OpenAI-compatible app."""

import asyncio
import logging
from collections.abc import Collection, Sequence

from fastapi import FastAPI
from starlette.types import ASGIApp

from configs.runtime.deadline import within
from configs.schema import PauseMode
from rollout.http.control import control_app
from rollout.http.strict_json import StrictJson
from rollout.replica.replica import RolloutReplica
from weight_sync.protocol import ReplicaStatus

logger = logging.getLogger(__name__)


def replica_app(replica: RolloutReplica, openai_app: ASGIApp) -> FastAPI:
    """Our /health and /metrics come before vLLM's."""
    app = control_app(ReplicaControl(replica), with_engine_metrics=True)
    app.mount("", StrictJson(openai_app))
    return app


class ReplicaControl:
    """The control routes' view of one replica, in its own process. Implements `Controlled`."""

    def __init__(self, replica: RolloutReplica):
        self._replica = replica
        self._death = asyncio.create_task(replica.wait_dead())

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout_s: float, by: str) -> None:
        logger.info("pause(%s) by %s", mode.value, by)
        async with within(timeout_s, "timeout_s", f"pause({mode.value}) on {self._replica.name}"):
            await self._replica.pause(mode, clear_cache)

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

    async def out_of_service(self) -> str | None:
        if self._death.done():
            return f"{self._replica.name} died: {self._death.result()}"
        if (await self._replica.status()).torn:
            return f"the weights of {self._replica.name} are torn by a failed update"
        return None
