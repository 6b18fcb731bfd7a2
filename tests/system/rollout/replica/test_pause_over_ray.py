"""A fleet of real actors in real processes, without a model, paused when one of them stands still."""

import asyncio
import os
import signal

import pytest

from configs.schema import PauseMode, WeightSyncConfig
from rollout.errors import FleetPauseError
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica_group import ReplicaHandle, create_replica
from tests.support.actors import SPEC, SimulatedActor, no_redirect
from tests.support.fakes import answer, make_request

DEADLINE_S = 120
TIMEOUT_S = 5
"""The one that is not late is to answer in it, however busy the machine."""


@pytest.mark.slow
def test_a_process_that_stands_still_is_named_and_not_paused_when_it_goes_on(ray_cluster: None) -> None:
    replicas = [create_replica(f"replica-{index}", SPEC, no_redirect, SimulatedActor) for index in range(2)]
    stopped, other = replicas
    fleet = FleetControl(ReplicaFleet(replicas, 8, 1, lambda _: None, serving=0))

    async def generates(replica: ReplicaHandle) -> bool:
        return answer((await replica.client.generate_group([make_request("one", 2)]))[0]) == (2, "stop")

    async def scenario() -> None:
        await asyncio.gather(*(replica.start(SPEC, WeightSyncConfig()) for replica in replicas))
        await asyncio.gather(*(replica.tag_loaded(0) for replica in replicas))
        process = (await stopped.actor.place.remote()).pid
        os.kill(process, signal.SIGSTOP)
        try:
            async with asyncio.timeout(8 * TIMEOUT_S):
                with pytest.raises(FleetPauseError) as raised:
                    await fleet.pause(PauseMode.keep, timeout_s=TIMEOUT_S)
            assert list(raised.value.errors) == [stopped.name]
            assert await generates(other)
        finally:
            os.kill(process, signal.SIGCONT)
        async with asyncio.timeout(DEADLINE_S):
            while any(status.pause_mode or status.frozen for status in await fleet.statuses()):
                await asyncio.sleep(0.02)
            assert len(await fleet.statuses()) == 2 and await generates(stopped)
        assert not await fleet.is_paused()

    try:
        asyncio.run(scenario())
    finally:
        for replica in replicas:
            replica.kill()
