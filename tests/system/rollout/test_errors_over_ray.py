"""Errors that are raised in real actors: they arrive as they were raised, and routes answer with their status."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from configs.schema import Config, RolloutConfig, TrainerConfig, WeightSyncConfig
from rollout.agents.worker_group import AgentWorkerActor, AgentWorkerGroup
from rollout.engines.base import EngineDiedError
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.http.control import control_app
from rollout.progress import Attempt
from rollout.replica.replica import RolloutReplica
from rollout.replica.replica_group import create_replica, to_actor
from rollout.request_ids import RequestId
from rollout.types import GenerationRequest, Prompt, SamplingParams
from scripts.launch.agents import load_loop
from tests.support.actors import SPEC, SimulatedActor, no_redirect
from tests.support.errors import assert_same, error_of, examples, raise_example
from tests.support.fakes import make_prompt, make_request
from trainer.worker.worker_group import TrainWorkerActor, TrainWorkerGroup

Call = Callable[[str, int], Awaitable[object]]
"""Gets the name and the number of an example, and lets an actor raise it."""
CONFIG = Config(rollout=RolloutConfig(num_agent_workers=1), trainer=TrainerConfig(num_ranks=1))


class Raises:
    """In place of a replica and of an agent worker."""

    def __init__(self) -> None:
        self.replicas: dict[str, Any] = {}

    async def generate_group(self, requests: list[GenerationRequest]) -> None:
        raise_example(list(examples())[requests[0].request_id.ordinal])

    async def run_group(self, prompt: Prompt, *_: Any) -> Any:
        raise_example(prompt.text)
        yield


class RaisingAgentWorker(AgentWorkerActor):
    def __init__(self, **_: Any):
        self._workers: Any = {"": Raises()}
        self._replicas: Any = {}
        self._moves: Any = {}


class IdleTrainWorker(TrainWorkerActor):
    def __init__(self, *_: Any, **__: Any):
        self._worker: Any = None


async def in_replica(_replica: RolloutReplica, name: str) -> None:
    raise_example(name)


async def of_each(call: Call) -> list[tuple[BaseException, BaseException]]:
    """(What arrives, what was raised) by the call, for every example."""
    arrived = await asyncio.gather(*(error_of(call(name, ordinal)) for ordinal, name in enumerate(examples())))
    return list(zip(arrived, examples().values(), strict=True))


def replace_replica(actor: Any) -> None:
    actor._replica = Raises()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_every_error_arrives_as_it_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.agents.worker_group.AgentWorkerActor", RaisingAgentWorker)
    monkeypatch.setattr("trainer.worker.worker_group.TrainWorkerActor", IdleTrainWorker)
    replica = create_replica("replica-0", SPEC, no_redirect, SimulatedActor)
    agents = AgentWorkerGroup(
        config=CONFIG, tokenizer_path="", replicas=[replica.client], on_start=no_redirect, load_loop=load_loop
    )
    trainers = TrainWorkerGroup(config=CONFIG, device="cpu", on_start=no_redirect)

    async def generates(ordinal: int) -> object:
        request = replace(make_request("one", 1), request_id=RequestId(ordinal=ordinal))
        return await replica.client.generate_group([request])

    async def in_agent_worker(name: str) -> object:
        """Call the worker itself: the group's run_group would replace a worker that is said to be lost."""
        worker, prompt = await agents._rotation.next(), replace(make_prompt(0), text=name)
        remote = worker.actor.run_group.options(num_returns="streaming")
        stream = remote.remote(prompt, replica.client, SamplingParams(), 1, Attempt(), time.time())
        return [await worker.answer(message) async for message in stream]

    async def scenario() -> None:
        await replica.start(SPEC, WeightSyncConfig())
        calls: dict[str, Call] = {
            "replica-0": lambda name, _: to_actor(in_replica)(replica, name),
            "agent-worker-0": lambda name, _: in_agent_worker(name),
            "train worker 0": lambda name, _: trainers._on_all(lambda worker: raise_example(name)),
        }
        for where, call in calls.items():
            for received, raised in await of_each(call):
                assert_same(received, raised, where)
        await replica.actor.__ray_call__.remote(replace_replica)
        for received, raised in await of_each(lambda _, ordinal: generates(ordinal)):
            if isinstance(raised, EngineDiedError):
                assert repr(received) == f"ReplicaLostError('replica-0 died while it generated: {raised}')"
                assert received.__cause__ is not None
                assert_same(received.__cause__, raised, "replica-0")
            else:
                assert_same(received, raised, "replica-0")

    try:
        asyncio.run(scenario())
    finally:
        replica.kill()
        trainers.kill()


class SlowActor(SimulatedActor):
    """Its steps take longer than its pauses may."""

    step_s = 0.5


def waits(actor: Any) -> bool:
    return bool(actor._replica._control._waits)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_status_of_a_route_holds_over_actors() -> None:
    replica = create_replica("replica-0", SPEC, no_redirect, SlowActor)

    async def status(client: httpx.AsyncClient, path: str) -> tuple[int, str]:
        response = await client.post(path)
        return response.status_code, response.text

    async def scenario() -> None:
        await replica.start(SPEC, WeightSyncConfig(pause_timeout_s=0.1))
        await replica.tag_loaded(0)
        fleet = FleetControl(ReplicaFleet([replica], 8, 1, lambda _: None, serving=0))
        app = httpx.ASGITransport(control_app(fleet))
        async with asyncio.timeout(30), httpx.AsyncClient(transport=app, base_url="http://fleet") as client:
            generating = asyncio.create_task(replica.client.generate_group([make_request("one", 20)]))
            while not (await replica.stats())["running"]:
                await asyncio.sleep(0.01)
            code, text = await status(client, "/pause?mode=keep")
            assert code == 504 and "pausing took longer than weight_sync.pause_timeout_s=0.1" in text
            waiting = asyncio.create_task(status(client, "/pause?mode=wait"))
            while not await replica.actor.__ray_call__.remote(waits):
                await asyncio.sleep(0.01)
            code, text = await status(client, "/pause?mode=keep")
            assert code == 409 and "resume first, or pause in mode abort" in text
            assert (await status(client, "/resume"))[0] == 200
            assert (await waiting)[0] == 409
            generating.cancel()

    try:
        asyncio.run(scenario())
    finally:
        replica.kill()
