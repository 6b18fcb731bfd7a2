"""Replicas on machines that are about to leave a cluster."""

import asyncio

from scripts.launch.leaving_nodes import take_off
from tests.support.fleets import DIED, START_S, OperatedFleet, operated


@operated(min_replicas=2)
async def test_a_replica_whose_machine_goes_before_it_could_drain_has_one_replacement(setup: OperatedFleet) -> None:
    for _ in range(2):
        await take_off(setup.operator, setup.fleet.replicas["replica-1"])
    expected = {"replica-0": "READY", "replica-1": "READY", "replica-2": "STARTING"}
    assert setup.states() == expected, "it may not drain: two would not be left"
    await setup.fleet.lose("replica-1", DIED)
    assert setup.states() == {**expected, "replica-1": "DEAD"}
    await asyncio.sleep(START_S + 1)
    assert setup.router.healthy == ["replica-0", "replica-2"]
    await setup.fleet.lose("replica-2", DIED)
    assert setup.states()["replica-3"] == "STARTING", "the replacement is replaced as any other"


@operated(min_replicas=2)
async def test_a_replacement_that_was_removed_replaces_nothing(setup: OperatedFleet) -> None:
    await take_off(setup.operator, setup.fleet.replicas["replica-1"])
    await setup.operator.remove("replica-2")
    await setup.fleet.lose("replica-1", DIED)
    assert setup.states() == {
        "replica-0": "READY",
        "replica-1": "DEAD",
        "replica-2": "DEAD",
        "replica-3": "STARTING",
    }


@operated()
async def test_a_replica_with_others_beside_it_drains_at_once(setup: OperatedFleet) -> None:
    await take_off(setup.operator, setup.fleet.replicas["replica-1"])
    assert setup.states() == {"replica-0": "READY", "replica-1": "DRAINING", "replica-2": "STARTING"}
