"""What a replica serves over HTTP: the control routes, and behind them vLLM's OpenAI-compatible app."""

import asyncio
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp

from configs.runtime.deadline import within
from configs.schema import PauseMode
from rollout.http.control import RequireToken, control_app
from rollout.replica.replica import RolloutReplica
from weight_sync.protocol import ReplicaStatus


def replica_app(replica: RolloutReplica, openai_app: ASGIApp, token: str | None) -> ASGIApp:
    """Our /health and /metrics come before vLLM's. With a token, everything but /health needs it: the only client is
    the gateway."""
    app = control_app(ReplicaControl(replica), with_engine_metrics=True)
    app.mount("", openai_app)
    return app if token is None else RequireToken(app, token, {"/health"})


class ReplicaControl:
    """The control routes' view of one replica, in its own process. Implements `Controlled`."""

    def __init__(self, replica: RolloutReplica):
        self._replica = replica
        self._death = asyncio.create_task(replica.wait_dead())

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout_s: float) -> None:
        async with within(timeout_s, "timeout_s", f"pause({mode.value}) on {self._replica.name}"):
            await self._replica.pause(mode, clear_cache)

    async def resume(self) -> object:
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
