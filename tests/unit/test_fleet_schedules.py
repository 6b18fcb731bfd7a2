"""Whatever happens to a fleet, in whatever order: who is routable, who gets updates, and who stays dead."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.lifecycle import IllegalTransitionError, ReplicaState
from rollout.members import FleetRefusalError, TooFewReplicasError
from tests.unit.test_fleet_operator import DIED, START_S, Setup, operated


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["lose", "add", "drain", "remove", "eject", "update", "wait"]), st.integers(0, 5))
    )
)
def test_whatever_happens_only_the_ready_are_routable_and_nobody_comes_back_from_the_dead(
    steps: list[tuple[str, int]],
) -> None:
    async def test(setup: Setup, running: asyncio.Task[None]) -> None:
        dead: set[str] = set()
        for step, number in steps:
            name = f"replica-{number}"
            try:
                match step:
                    case "add":
                        setup.operator.add(1)
                    case "wait":
                        await asyncio.sleep(number * START_S / 3)
                    case "update":
                        await setup.manager.update_weights(7 + number)
                    case "lose" | "eject" if name in setup.fleet.lives:
                        await getattr(setup.fleet, step)(name, DIED)
                    case "drain" | "remove":
                        await getattr(setup.operator, step)(name)
                    case _:
                        pass
            except (FleetRefusalError, IllegalTransitionError):
                continue
            except TooFewReplicasError:
                return
            lives = setup.fleet.lives
            ready = [name for name, life in lives.items() if life.state is ReplicaState.READY]
            assert setup.router.healthy == ready
            unverified = {replica.name for replica in setup.fleet.targets if lives[replica.name].global_steps < 0}
            assert unverified.isdisjoint(ready)
            assert dead <= (dead := {name for name, life in lives.items() if life.state is ReplicaState.DEAD})

    operated(test)
