"""Whatever happens to a fleet, in whatever order: who is routable, on which version, who stays dead."""

import asyncio

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout.errors import TooFewReplicasError
from rollout.fleet.fleet import FleetRefusalError
from rollout.fleet.lifecycle import IllegalTransitionError, ReplicaState
from tests.unit.rollout.fleet.test_operator import DIED, START_S, Setup, operated

STEPS = ["lose", "add", "drain", "remove", "eject", "train", "update", "pin", "unpin", "wait"]


async def take(step: str, number: int, setup: Setup, pinned: list[str]) -> None:
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
            async with setup.manager.publishing:
                pinned += await setup.fleet.pin(number, "it evaluates")
        case "unpin":
            setup.fleet.unpin(pinned)
            await setup.manager.catch_up(pinned)
            pinned.clear()
        case "lose" | "eject" if name in setup.fleet.lives:
            await getattr(setup.fleet, step)(name, DIED)
        case "drain" | "remove":
            await getattr(setup.operator, step)(name)
        case _:
            pass


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5))))
@example([("add", 0), ("wait", 2), ("train", 0), ("wait", 2)])
@example([("pin", 1), ("train", 0), ("unpin", 0)])
def test_whatever_happens_only_the_ready_are_routable_on_one_version_and_nobody_comes_back_from_the_dead(
    steps: list[tuple[str, int]],
) -> None:
    async def test(setup: Setup, running: asyncio.Task[None]) -> None:
        dead: set[str] = set()
        pinned: list[str] = []
        newest = 0
        for step, number in steps:
            try:
                await take(step, number, setup, pinned)
            except (FleetRefusalError, IllegalTransitionError):
                continue
            except TooFewReplicasError:
                return
            lives = setup.fleet.lives
            ready = [name for name, life in lives.items() if life.state is ReplicaState.READY]
            assert setup.router.healthy == ready
            unverified = {replica.name for replica in setup.fleet.targets if lives[replica.name].global_steps < 0}
            assert unverified.isdisjoint(ready)
            if ready and not setup.manager.publishing.locked():
                serving = {lives[name].global_steps for name in ready}
                assert len(serving) == 1
                assert newest <= (newest := max(serving))
            assert dead <= (dead := {name for name, life in lives.items() if life.state is ReplicaState.DEAD})

    operated(test)
