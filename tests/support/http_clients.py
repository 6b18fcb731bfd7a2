"""HTTP clients of the control routes of one replica and of a fleet, without a network."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.types import ASGIApp

from configs.schema import WeightSyncConfig
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.http.control import control_app
from rollout.http.replica_app import ReplicaControl
from rollout.replica.replica import RolloutReplica
from rollout.router import ReplicaRouter
from rollout.types import Completion
from tests.support.fakes import ClockedEngine, answer, make_request


def make_replica(engine: ClockedEngine, name: str = "r0") -> RolloutReplica:
    return RolloutReplica(name, engine, WeightSyncConfig())


@asynccontextmanager
async def client_of(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


@asynccontextmanager
async def replica_client(engine: ClockedEngine) -> AsyncIterator[tuple[RolloutReplica, httpx.AsyncClient]]:
    replica = make_replica(engine)
    await replica.tag_loaded(3)
    async with client_of(control_app(ReplicaControl(replica))) as client:
        yield replica, client


@asynccontextmanager
async def fleet_client(
    *engines: ClockedEngine,
) -> AsyncIterator[tuple[list[RolloutReplica], httpx.AsyncClient, ReplicaRouter]]:
    replicas = [make_replica(engine, f"r{index}") for index, engine in enumerate(engines)]
    fleet = ReplicaFleet(replicas, 99, min_replicas=1, report=lambda _: None, serving=3)
    for replica in replicas:
        await replica.tag_loaded(3)
    async with client_of(control_app(FleetControl(fleet))) as client:
        yield replicas, client, fleet.router


def generating(replica: RolloutReplica, name: str, num_tokens: int) -> asyncio.Task[list[Completion]]:
    return asyncio.create_task(replica.generate_group([make_request(name, num_tokens)]))


async def result(task: asyncio.Task[list[Completion]]) -> tuple[int, str]:
    return answer((await task)[0])
