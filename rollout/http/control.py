"""The control routes of vLLM and of FastDeploy over one replica or the whole fleet."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from pydantic import AfterValidator, BaseModel

from configs.schema import PauseMode
from rollout.errors import FleetPauseError, PauseConflictError
from rollout.http.exposition import exposition, merge_engine
from rollout.request_ids import ClientNames
from weight_sync.protocol import ReplicaStatus

PAUSE_TIMEOUT_S = 60.0
"""The default of a pause's `timeout_s`."""
STATUSES = {409: PauseConflictError, 504: TimeoutError}
"""The statuses of a pause, a resume or an abort that failed with one of these errors. Any other error is a 500."""


class Controlled(Protocol):
    """One replica or the whole fleet, on which the control routes act."""

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout_s: float, by: str) -> None:
        """Pause generation. `by` names the client, for logs and events."""
        ...

    async def resume(self, by: str) -> object: ...

    async def abort(self, names: Collection[str] | None) -> list[str]: ...

    async def is_paused(self) -> bool: ...

    async def statuses(self) -> Sequence[ReplicaStatus]: ...

    async def stats(self) -> dict[str, dict[str, float]]: ...

    async def engine_metrics(self) -> dict[str, str]:
        """Return what each replica's engine exports for Prometheus, by the name of the replica."""
        ...

    async def out_of_service(self) -> str | None:
        """Return why it cannot serve; None when it can."""
        ...


def _utf8(text: str) -> str:
    text.encode()  # raises for half a surrogate pair, which the answer could not name
    return text


class AbortRequests(BaseModel):
    req_ids: list[Annotated[str, AfterValidator(_utf8)]] = []
    abort_all: bool = False


def control_app(controlled: Controlled, run_metrics: Callable[[], Mapping[str, float]] = dict) -> FastAPI:
    """Return the control routes. `run_metrics` returns the latest metrics of the run, for /metrics: none by default."""
    app = FastAPI(title="slipstream")
    _add_vllm_routes(app, controlled)
    _add_fastdeploy_routes(app, controlled)
    _add_state_routes(app, controlled, run_metrics)
    for status, error in STATUSES.items():
        app.add_exception_handler(error, answer_with(status))
    app.add_exception_handler(FleetPauseError, _fleet_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


def answer_with(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(_request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, status_code=status)

    return handle


def _add_vllm_routes(app: FastAPI, controlled: Controlled) -> None:
    """Add vLLM's routes. `clear_cache` is false by default, because the prefix cache is salted with the version."""

    @app.post("/pause")
    async def pause(
        request: Request,
        mode: PauseMode = PauseMode.abort,
        clear_cache: bool = False,
        timeout_s: Annotated[float, Query(gt=0, allow_inf_nan=False)] = PAUSE_TIMEOUT_S,
    ) -> dict[str, str]:
        await controlled.pause(mode, clear_cache, timeout_s, caller(request))
        return {"status": "paused"}

    @app.post("/resume")
    async def resume(request: Request) -> dict[str, str]:
        await controlled.resume(caller(request))
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": await controlled.is_paused()}


def _add_fastdeploy_routes(app: FastAPI, controlled: Controlled) -> None:
    """Add FastDeploy's routes, whose pause aborts."""

    @app.post("/v1/pause")
    async def pause(request: Request) -> dict[str, Any]:
        await controlled.pause(PauseMode.abort, False, PAUSE_TIMEOUT_S, caller(request))
        return _success(None)

    @app.post("/v1/resume")
    async def resume(request: Request) -> dict[str, Any]:
        await controlled.resume(caller(request))
        return _success(None)

    @app.get("/v1/is_paused")
    async def is_paused() -> dict[str, Any]:
        return _success({"is_paused": await controlled.is_paused()})

    @app.post("/v1/abort_requests")
    async def abort_requests(body: AbortRequests) -> dict[str, Any]:
        """Abort requests, named by the ids of their responses or by the X-Request-Id that clients sent."""
        if not body.abort_all and not body.req_ids:
            raise HTTPException(400, "must provide abort_all=true or req_ids")
        ended = await controlled.abort(None if body.abort_all else body.req_ids)
        known = [ClientNames.of(name) for name in ended]
        if body.abort_all:
            return _success({"aborted": sorted({names.response for names in known}), "not_found": []})
        names = {name for names in known for name in names}
        return _success(
            {
                "aborted": [name for name in body.req_ids if name in names],
                "not_found": [name for name in body.req_ids if name not in names],
            }
        )


def _add_state_routes(app: FastAPI, controlled: Controlled, run_metrics: Callable[[], Mapping[str, float]]) -> None:

    @app.get("/health")
    async def health() -> Response:
        reason = await controlled.out_of_service()
        return Response(status_code=200) if reason is None else JSONResponse({"error": reason}, status_code=503)

    @app.get("/versions")
    async def versions() -> dict[str, int]:
        return {status.name: status.global_steps for status in await controlled.statuses()}

    @app.get("/metrics")
    async def metrics() -> Response:
        statuses, stats, engines = await asyncio.gather(
            controlled.statuses(), controlled.stats(), controlled.engine_metrics()
        )
        families: dict[str, Metric] = {}
        for replica, exported in engines.items():
            merge_engine(families, replica, exported)
            await asyncio.sleep(0)  # some milliseconds each, and the loop has a run to drive
        text = exposition(statuses, stats, families.values(), run_metrics())
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def caller(request: Request) -> str:
    """Return the address and the program of a client. Example: "127.0.0.1:40312 (curl/8.5.0)" """
    where = "a local process" if request.client is None else f"{request.client.host}:{request.client.port}"
    program = re.sub(r"[^\x20-\x7e]", "?", request.headers.get("user-agent", ""))[:60]  # it reaches a terminal
    return f"{where} ({program})" if program else where


def _success(result: Any) -> dict[str, Any]:
    return {"status": "success", "result": result}


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    """Answer what is wrong and where. The value is not repeated, since it may be bytes, NaN or half a character."""
    assert isinstance(error, RequestValidationError)
    problems = (f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
    return JSONResponse({"error": "; ".join(problems)}, status_code=422)


async def _fleet_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, FleetPauseError)
    reasons = {name: str(reason).partition("\n")[0] or repr(reason) for name, reason in error.errors.items()}
    message = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    # The status that a single replica would answer with, if all replicas that failed agree.
    agreed = (status for status, kind in STATUSES.items() if all(isinstance(e, kind) for e in error.errors.values()))
    return JSONResponse({"error": message, "replicas": reasons}, status_code=next(agreed, 500))
