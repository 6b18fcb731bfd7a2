"""Updates of real replicas on clocked engines, by the checkpoint manager: through generation, pauses and what fails."""

import asyncio

import pytest

from configs.schema import PauseMode, WeightSyncConfig
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.router import ReplicaRouter
from rollout.types import VersionSpan
from tests.support.fakes import ClockedEngine, make_replica, start_group
from tests.support.updates import DEADLINES, FakeSource
from weight_sync.checkpoint_manager import CheckpointManager


class Setup:
    """Replicas a and b; `told`: by the fleet."""

    def __init__(self, mode: PauseMode):
        self.told: list[str] = []
        self.engines = [ClockedEngine(), ClockedEngine()]
        self.replicas = [make_replica(n, e, pause_mode=mode) for n, e in zip("ab", self.engines, strict=True)]
        self.router = ReplicaRouter(["a", "b"], 8)
        self.fleet = ReplicaFleet(self.replicas, self.router, 1, self.told.append, serving=0)
        self.control = FleetControl(self.fleet)
        self.manager = CheckpointManager(FakeSource("trainer", []), self.fleet, WeightSyncConfig(**DEADLINES))


async def on_version_0(mode: PauseMode = PauseMode.keep) -> Setup:
    setup = Setup(mode)
    await setup.manager.update_weights(0)
    return setup


async def test_a_driver_that_goes_away_leaves_them_open_and_whole() -> None:
    """One of them stages, the other is in the midst of its pause."""

    setup = await on_version_0()
    groups = [start_group(replica, 9) for replica in setup.replicas]
    await asyncio.sleep(0.5)
    setup.engines[0].seconds["swap"], setup.engines[1].seconds["stage"] = 20, 20
    updating = asyncio.create_task(setup.manager.update_weights(1))
    await asyncio.sleep(5)
    updating.cancel()
    await asyncio.wait([updating])
    assert (await groups[0])[0].spans == (VersionSpan(0, 1, 0), VersionSpan(1, 9, 1))
    assert (await groups[1])[0].spans == (VersionSpan(0, 9, 0),)
    statuses = await setup.control.statuses()
    assert [(status.global_steps, status.torn) for status in statuses] == [(1, False), (0, False)]
    assert not await setup.control.is_paused()


async def test_one_that_cannot_be_told_to_go_on_is_given_up() -> None:
    setup = await on_version_0()
    setup.engines[1].seconds["thaw"] = 1e6
    await setup.manager.update_weights(1)
    reason = "commit on b failed: TimeoutError: resuming took longer than weight_sync.pause_timeout_s=10.0"
    assert setup.told == [f"b is out of service: {reason}", f"b is given up: {reason}"]
    assert setup.fleet.targets == [setup.replicas[0]]


@pytest.mark.parametrize(("mode", "tokens_before"), [(PauseMode.keep, 15), (PauseMode.abort, 14)])
async def test_a_pause_that_waits_for_long_requests_costs_no_replica(mode: PauseMode, tokens_before: int) -> None:
    setup = await on_version_0(mode)
    groups = [start_group(replica, 900) for replica in setup.replicas]
    await asyncio.sleep(4.5)
    pausing = asyncio.create_task(setup.control.pause(PauseMode.wait, timeout_s=2000))
    await asyncio.sleep(10)
    report = await setup.manager.update_weights(1)
    assert report.failures == 0 and setup.router.healthy == ["a", "b"]
    await pausing
    assert await setup.control.is_paused()
    await setup.control.resume()
    for group in groups:
        spans = (VersionSpan(0, tokens_before, 0), VersionSpan(tokens_before, 900, 1))
        assert (await group)[0].spans == spans
