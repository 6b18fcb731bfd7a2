"""A fleet of real actors in real processes, without a model, paused when one of them is late or stands still."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest

from configs.schema import PauseMode, WeightSyncConfig
from rollout.errors import FleetPauseError
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica_group import ReplicaHandle, create_replica
from rollout.router import ReplicaRouter
from tests.support.actors import SPEC, SimulatedActor, no_redirect
from tests.support.fakes import answer, make_request

DEADLINE_S = 120
TIMEOUT_S = 5
"""The one that is not late is to answer in it, however busy the machine."""


@pytest.fixture(scope="module")
def replicas(ray_cluster: None) -> Iterator[list[ReplicaHandle]]:
    replicas = [create_replica(f"replica-{index}", SPEC, no_redirect, SimulatedActor) for index in range(2)]

    async def start(replica: ReplicaHandle) -> None:
        await replica.start(SPEC, WeightSyncConfig())
        await replica.tag_loaded(0)

    async def start_all() -> None:
        await asyncio.gather(*(start(replica) for replica in replicas))

    asyncio.run(start_all())
    yield replicas
    for replica in replicas:
        replica.kill()


def on_fleet(replicas: list[ReplicaHandle], test: Callable[[FleetControl], Awaitable[None]]) -> None:
    async def main() -> None:
        router = ReplicaRouter([replica.name for replica in replicas], 8)
        async with asyncio.timeout(DEADLINE_S):
            await test(FleetControl(ReplicaFleet(replicas, router, 1, lambda text: None, serving=0)))

    asyncio.run(main())


async def until_open(fleet: FleetControl) -> None:
    while [status.pause_mode or status.frozen for status in await fleet.statuses()] != [False, False]:
        await asyncio.sleep(0.02)


def test_a_wait_past_its_deadline_is_taken_back_on_the_replica_that_was_late(replicas: list[ReplicaHandle]) -> None:
    async def test(fleet: FleetControl) -> None:
        late = replicas[1]
        long = asyncio.create_task(late.client.generate_group([make_request("long", 100_000)]))
        await asyncio.sleep(0.2)
        with pytest.raises(FleetPauseError) as raised:
            await fleet.pause(PauseMode.wait, timeout_s=TIMEOUT_S)
        assert list(raised.value.errors) == [late.name]
        assert answer((await late.client.generate_group([make_request("new", 2)]))[0]) == (2, "stop")
        assert not long.done(), "it was let in beside the one that takes so long"
        before = (await late.stats())["tokens"]
        while (await late.stats())["tokens"] < before + 10:  # the long one goes on: nothing else is there
            await asyncio.sleep(0.02)
        assert await late.abort(["long"]) == ["long"]
        assert (await long)[0].finish_reason == "abort"
        await asyncio.sleep(0.2)
        assert not await fleet.is_paused()

    on_fleet(replicas, test)


def test_a_process_that_stands_still_is_named_and_not_paused_when_it_goes_on(replicas: list[ReplicaHandle]) -> None:
    async def test(fleet: FleetControl) -> None:
        process = (await replicas[0].actor.place.remote())[2]
        os.kill(process, signal.SIGSTOP)
        try:
            loop = asyncio.get_running_loop()
            began = loop.time()
            with pytest.raises(FleetPauseError) as raised:
                await fleet.pause(PauseMode.keep, timeout_s=TIMEOUT_S)
            assert list(raised.value.errors) == [replicas[0].name] and loop.time() - began < 8 * TIMEOUT_S
            assert answer((await replicas[1].client.generate_group([make_request("other", 2)]))[0]) == (2, "stop")
        finally:
            os.kill(process, signal.SIGCONT)
        await until_open(fleet)
        assert answer((await replicas[0].client.generate_group([make_request("again", 2)]))[0]) == (2, "stop")
        assert not await fleet.is_paused()

    on_fleet(replicas, test)
