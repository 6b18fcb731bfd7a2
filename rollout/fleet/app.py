"""Routes by which an operator changes the fleet of a running run: what scripts/fleet.py talks to."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse

from rollout.fleet.lifecycle import IllegalTransitionError
from rollout.fleet.members import FleetRefusalError
from rollout.fleet.operator import FleetOperator

MAX_ADDED = 1024


def fleet_app(operator: FleetOperator) -> FastAPI:
    """What is refused is answered with 409 and the reason, and changes nothing."""
    app = FastAPI(title="slipstream fleet")

    @app.get("/replicas")
    async def replicas() -> list[dict[str, Any]]:
        return [asdict(row) for row in operator.rows()]

    @app.post("/replicas")
    async def add(count: Annotated[int, Query(ge=1, le=MAX_ADDED)] = 1) -> list[str]:
        """Names of the new replicas, which start now."""
        return operator.add(count)

    @app.post("/replicas/{name}/drain")
    async def drain(name: str) -> None:
        await operator.drain(name)

    @app.post("/replicas/{name}/remove")
    async def remove(name: str) -> None:
        """Returns when it has ended."""
        await operator.remove(name)

    for refusal in (FleetRefusalError, IllegalTransitionError):
        app.add_exception_handler(refusal, _refused)
    return app


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=409)
