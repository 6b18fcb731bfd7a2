"""The control routes of vLLM and of FastDeploy, over one replica or the whole fleet."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from configs.schema import PauseMode
from rollout.errors import FleetPauseError
from rollout.http.metrics import exposition
from rollout.replica.pause import PauseConflictError, PauseInterruptedError
from rollout.request_ids import ClientNames
from weight_sync.protocol import ReplicaStatus

OPEN_PATHS = ("/health", "/metrics", "/versions")
"""Routes that change nothing, so that probes and scrapers need no token."""


PAUSE_TIMEOUT_S = 60.0
"""Default of the `timeout_s` of a pause."""


class Controlled(Protocol):
    """What the control routes act on: one replica, or the fleet."""

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout_s: float) -> None:
        """Return when the pause is complete. When it fails, everything is as it was before."""
        ...

    async def resume(self) -> object: ...

    async def abort(self, names: Collection[str] | None) -> list[str]:
        """End these requests, or all. Returns the engine's names of those that it ended."""
        ...

    async def is_paused(self) -> bool: ...

    async def statuses(self) -> Sequence[ReplicaStatus]: ...

    async def stats(self) -> dict[str, dict[str, float]]:
        """Counters of each replica."""
        ...

    async def out_of_service(self) -> str | None:
        """Why it cannot serve; None when it can."""
        ...


class AbortRequests(BaseModel):
    req_ids: list[str] = []
    abort_all: bool = False


def control_app(controlled: Controlled, with_engine_metrics: bool) -> FastAPI:
    """An app with all control routes. The caller may add others."""
    app = FastAPI(title="slipstream")
    app.include_router(_vllm_routes(controlled))
    app.include_router(_fastdeploy_routes(controlled))
    app.include_router(_state_routes(controlled, with_engine_metrics))
    for error in (PauseConflictError, PauseInterruptedError):
        app.add_exception_handler(error, _conflict)
    app.add_exception_handler(FleetPauseError, _fleet_error)
    app.add_exception_handler(TimeoutError, _too_late)
    return app


def _vllm_routes(controlled: Controlled) -> APIRouter:
    """vLLM's `/pause`, `/resume`, `/is_paused`. Its `clear_cache` defaults to true; here to false, because the prefix
    cache is salted with the version: new requests never read what older weights computed."""
    router = APIRouter()

    @router.post("/pause")
    async def pause(
        mode: PauseMode = PauseMode.abort,
        clear_cache: bool = False,
        timeout_s: Annotated[float, Query(gt=0)] = PAUSE_TIMEOUT_S,
    ) -> dict[str, str]:
        """Answer when the pause is complete. Requests in flight end (`abort`), finish (`wait`) or freeze (`keep`)."""
        await controlled.pause(mode, clear_cache, timeout_s)
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        await controlled.resume()
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": await controlled.is_paused()}

    return router


def _fastdeploy_routes(controlled: Controlled) -> APIRouter:
    """FastDeploy's control routes: its pause aborts, and every answer is `{"status": "success", "result": ...}`."""
    router = APIRouter(prefix="/v1")

    @router.post("/pause")
    async def pause() -> dict[str, Any]:
        await controlled.pause(PauseMode.abort, False, PAUSE_TIMEOUT_S)
        return _success(None)

    @router.post("/resume")
    async def resume() -> dict[str, Any]:
        await controlled.resume()
        return _success(None)

    @router.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return _success({"is_paused": await controlled.is_paused()})

    @router.post("/abort_requests")
    async def abort_requests(body: AbortRequests) -> dict[str, Any]:
        """A request is named by the id of its response, or by the X-Request-Id that its client sent."""
        if not body.abort_all and not body.req_ids:
            raise HTTPException(400, "must provide abort_all=true or req_ids")
        ended = await controlled.abort(None if body.abort_all else body.req_ids)
        known = [ClientNames.of(name) for name in ended]
        if body.abort_all:
            return _success({"aborted": sorted({names.response for names in known}), "not_found": []})
        names = {name for names in known for name in names.every}
        return _success(
            {
                "aborted": [name for name in body.req_ids if name in names],
                "not_found": [name for name in body.req_ids if name not in names],
            }
        )

    return router


def _state_routes(controlled: Controlled, with_engine_metrics: bool) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        reason = await controlled.out_of_service()
        return Response(status_code=200) if reason is None else JSONResponse({"error": reason}, status_code=503)

    @router.get("/versions")
    async def versions() -> dict[str, int]:
        """The `global_steps` of the weights that each replica serves; -1 before its first."""
        return {status.name: status.global_steps for status in await controlled.statuses()}

    @router.get("/metrics")
    async def metrics() -> Response:
        text = exposition(await controlled.statuses(), await controlled.stats(), with_engine_metrics)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


def _success(result: Any) -> dict[str, Any]:
    return {"status": "success", "result": result}


async def _conflict(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=409)


async def _fleet_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, FleetPauseError)
    # Ray puts the remote traceback before the message, which is the last line.
    reasons = {name: str(reason).strip().rpartition("\n")[2] for name, reason in error.errors.items()}
    message = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return JSONResponse({"error": message, "replicas": reasons}, status_code=_status_of(error.errors.values()))


def _status_of(errors: Collection[BaseException]) -> int:
    """The status that a single replica would answer with, if all that failed agree."""
    for kinds, status in (((PauseConflictError, PauseInterruptedError), 409), (TimeoutError, 504)):
        if all(isinstance(error, kinds) for error in errors):
            return status
    return 500


async def _too_late(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=504)
