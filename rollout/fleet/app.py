"""HTTP routes that show and change the fleet of a training run. `scripts/fleet.py` is their client."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query

from rollout.fleet.operator import FleetOperator
from rollout.http.control import answer_with
from rollout.replica.lifecycle import FleetRefusalError

MAX_ADDED = 1024


def fleet_app(operator: FleetOperator) -> FastAPI:
    """Return the routes. A refused change answers 409 with the reason, and changes nothing."""
    app = FastAPI(title="slipstream fleet")

    @app.get("/replicas")
    async def replicas() -> list[dict[str, Any]]:
        return [asdict(row) for row in operator.rows()]

    @app.post("/replicas")
    async def add(count: Annotated[int, Query(ge=1, le=MAX_ADDED)] = 1) -> list[str]:
        """Start new replicas. Returns their names at once."""
        return operator.add(count)

    @app.post("/replicas/{name}/drain")
    async def drain(name: str) -> None:
        await operator.drain(name)

    @app.post("/replicas/{name}/remove")
    async def remove(name: str) -> None:
        """Return when the replica has ended."""
        await operator.remove(name)

    app.add_exception_handler(FleetRefusalError, answer_with(409))
    return app
