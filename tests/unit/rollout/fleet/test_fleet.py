"""Which replicas serve, and whatever happens to a fleet, in whatever order: who is routable, on which version."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.schema import PauseMode
from rollout.engines.base import EngineDiedError
from rollout.errors import TooFewReplicasError
from rollout.replica.lifecycle import FleetRefusalError, ReplicaState
from tests.support.fakes import answer, settle
from tests.support.fleets import DIED, START_S, FleetSetup, OperatedFleet, on_fleet, operated

# -- who serves --------------------------------------------------------------------------------------------------------


@on_fleet()
async def test_an_ejected_replica_goes_on_with_what_it_has_and_comes_back(setup: FleetSetup) -> None:
    groups = setup.start(5)
    await setup.fleet.eject("b", OSError("not verified"))
    assert setup.router.healthy == ["a"] and [replica.name for replica in setup.fleet.targets] == ["a", "b"]
    assert answer((await groups["b"])[0]) == (5, "stop")
    for _ in range(2):
        await setup.fleet.admit("b", 1)
    assert setup.router.healthy == ["a", "b"]
    assert setup.told == ["b is out of service: not verified", "b is back in service"]


@on_fleet()
async def test_a_replica_that_is_given_up_is_ended_with_what_it_generates_and_never_comes_back(
    setup: FleetSetup,
) -> None:
    groups = setup.start(5)
    await settle()
    for _ in range(2):
        await setup.fleet.give_up("b", OSError("torn"))
    with pytest.raises(EngineDiedError):
        await groups["b"]
    await setup.fleet.admit("b", 1)
    assert setup.router.healthy == ["a"] and [replica.name for replica in setup.fleet.targets] == ["a"]
    assert setup.told == ["b is given up: torn"]
    await setup.control.pause(PauseMode.keep)
    assert await setup.paused() == {"a": "keep"}


@on_fleet(min_replicas=2)
async def test_a_loss_that_leaves_too_few_is_an_error(setup: FleetSetup) -> None:
    for _ in range(2):
        with pytest.raises(TooFewReplicasError) as raised:
            await setup.fleet.lose("b", DIED)
        assert raised.value.__cause__ is DIED
        assert str(raised.value) == "1 replicas are left in service, rollout.min_replicas=2: out of memory"
    assert setup.told == ["b is given up: out of memory"]


# -- whatever happens --------------------------------------------------------------------------------------------------

STEPS = ["lose", "add", "drain", "remove", "eject", "train", "update", "pin", "unpin", "wait"]


async def take(step: str, number: int, setup: OperatedFleet, pinned: list[str]) -> None:
    name = f"replica-{number}"
    match step:
        case "add":
            setup.operator.add(1)
        case "wait":
            await asyncio.sleep(number * START_S / 3)
        case "train":
            async with setup.manager.publishing:
                setup.source.global_steps += 1
        case "update":
            await setup.manager.update_weights(setup.source.global_steps)
        case "pin":
            async with setup.manager.updating:
                pinned += await setup.fleet.pin(number, "it evaluates")
        case "unpin":
            setup.fleet.unpin(pinned)
            await setup.manager.catch_up(pinned)
            pinned.clear()
        case "lose" | "eject" if name in setup.fleet.replicas:
            await getattr(setup.fleet, step)(name, DIED)
        case "drain" | "remove":
            await getattr(setup.operator, step)(name)
        case _:
            pass


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5))))
@example([("add", 0), ("wait", 2), ("train", 0), ("wait", 2)])
@example([("pin", 1), ("train", 0), ("unpin", 0)])
@example([("drain", 0), ("eject", 1)])  # the drained one ends while the other is out of service: no loss
def test_whatever_happens_only_the_ready_are_routable_on_one_version_and_nobody_comes_back_from_the_dead(
    steps: list[tuple[str, int]],
) -> None:
    async def test(setup: OperatedFleet) -> None:
        dead: set[str] = set()
        pinned: list[str] = []
        newest = 0
        for step, number in steps:
            try:
                await take(step, number, setup, pinned)
            except FleetRefusalError:
                continue
            except TooFewReplicasError:
                return
            lives = setup.fleet.replicas
            ready = [name for name, life in lives.items() if life.state is ReplicaState.READY]
            assert setup.router.healthy == ready
            unverified = {replica.name for replica in setup.fleet.targets if lives[replica.name].version < 0}
            assert unverified.isdisjoint(ready)
            if ready and not setup.manager.updating.locked():
                serving = {lives[name].version for name in ready}
                assert len(serving) == 1
                assert newest <= (newest := max(serving))
            assert dead <= (dead := {name for name, life in lives.items() if life.state is ReplicaState.DEAD})

    operated()(test)()
