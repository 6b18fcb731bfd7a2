"""Replicas that are replaced, added, drained and removed: in which order, within which budget, and what is refused."""

import asyncio

import pytest

from configs.schema import PauseMode, WeightSyncConfig
from rollout.errors import TooFewReplicasError
from rollout.replica.lifecycle import FleetRefusalError
from rollout.replica.replica import RolloutReplica
from tests.support.fakes import ClockedEngine, now, settle, start_group
from tests.support.fleets import DIED, DRAIN_S, START_S, OperatedFleet, operated


@operated()
async def test_a_lost_replica_is_replaced_by_one_that_serves_only_with_current_weights(setup: OperatedFleet) -> None:
    await asyncio.sleep(5)
    await setup.fleet.lose("replica-1", DIED)
    assert setup.states() == {"replica-0": "READY", "replica-1": "DEAD", "replica-2": "STARTING"}
    setup.source.global_steps = 8
    await setup.manager.update_weights(8)
    assert setup.source.orders[-1][0] == {"replica-0": 1}, "who is starting gets no updates"
    await asyncio.sleep(START_S + 1)
    assert setup.states()["replica-2"] == "READY" and setup.router.healthy == ["replica-0", "replica-2"]
    assert setup.source.orders[-1] == ({"replica-2": 1}, None)
    started, caught_up = (e for e in setup.events if not e.startswith("trainer"))
    assert (started, caught_up) == ("start replica-2 at 5", "catch up replica-2; routable: replica-0")
    assert [(await r.status()).global_steps for r in setup.fleet.targets] == [8, 8]
    assert setup.told == [
        "replica-1 is given up: out of memory",
        "replica-2 is to replace replica-1",
        "replica-2 is in service, 10.0 s after the one it replaces was lost",
    ]
    assert setup.fleet.gauges() == {
        "rollout/replicas_ready": 2,
        "rollout/replicas_lost": 1,
        "rollout/replicas_replaced": 1,
        "rollout/recovery_s": 10,
    }


@operated()
async def test_while_a_replacement_is_on_its_way_a_run_without_replicas_waits_for_it(setup: OperatedFleet) -> None:
    for name in ("replica-0", "replica-1"):
        await setup.fleet.lose(name, DIED)
    waiting = asyncio.create_task(setup.router.acquire(1))
    await settle()
    assert not waiting.done() and not setup.running.done()
    assert await waiting == "replica-2" and now() == START_S


@operated()
async def test_nothing_is_routed_to_the_dead_from_the_moment_of_the_loss_on(setup: OperatedFleet) -> None:
    losing = asyncio.create_task(setup.fleet.lose("replica-1", DIED))
    await asyncio.sleep(0)
    assert not losing.done() and setup.router.healthy == ["replica-0"]
    await losing


@pytest.mark.parametrize("mode", PauseMode)
@operated()
async def test_who_joins_a_paused_fleet_is_paused_too_until_the_fleet_is_resumed(
    setup: OperatedFleet, mode: PauseMode
) -> None:
    await setup.control.pause(mode)
    for name in ("replica-0", "replica-1"):
        await setup.fleet.lose(name, DIED)
    await asyncio.sleep(START_S + 1)
    assert setup.router.healthy == ["replica-2", "replica-3"]
    assert await setup.control.is_paused()
    assert [status.pause_mode for status in await setup.control.statuses()] == [mode.value] * 2
    frozen = start_group(setup.replicas["replica-2"], 3)
    await asyncio.sleep(50)
    assert not frozen.done()
    await setup.control.resume()
    await frozen
    setup.operator.add(1)
    await asyncio.sleep(START_S + 1)
    assert "replica-4" in setup.router.healthy and not await setup.control.is_paused()


@operated()
async def test_who_cannot_be_paused_does_not_join_a_paused_fleet(setup: OperatedFleet) -> None:
    class Unpausable(RolloutReplica):
        async def pause(self, mode: PauseMode, clear_cache: bool = False) -> None:
            raise OSError("cannot freeze")

    await setup.control.pause(PauseMode.keep)
    make, setup.make = setup.make, lambda name: Unpausable(name, ClockedEngine(), WeightSyncConfig())
    setup.operator.add(1)
    await asyncio.sleep(START_S + 1)
    setup.make = make
    failed = "replica-2 is given up: pause(keep) failed on replica-2: OSError('cannot freeze')"
    assert setup.told == ["paused (keep) by the program", failed, "replica-3 is to replace replica-2"]
    assert await setup.control.is_paused()


@operated(fails=True)
async def test_when_the_budget_is_used_up_the_run_ends_and_says_why(setup: OperatedFleet) -> None:
    setup.failures = [RuntimeError("no GPU"), ValueError("no such model")]
    await setup.fleet.lose("replica-0", DIED)
    await setup.fleet.lose("replica-1", DIED)
    with pytest.raises(ExceptionGroup) as raised:
        await setup.running
    reason = (
        "0 replicas are left in service, rollout.min_replicas=1, and rollout.max_replacements=2 are used up: "
        "no such model"
    )
    assert raised.group_contains(TooFewReplicasError) and str(raised.value.exceptions[0]) == reason
    assert setup.told[-1] == "replica-3 is given up: no such model"


@operated()
async def test_a_replacement_that_fails_is_tried_again_under_another_name_and_counts_from_the_first_loss(
    setup: OperatedFleet,
) -> None:
    setup.failures = [RuntimeError("no room")]
    await setup.fleet.lose("replica-1", DIED)
    await asyncio.sleep(2 * START_S + 1)
    assert setup.told[-1] == "replica-3 is in service, 20.0 s after the one it replaces was lost"
    assert setup.states() == {
        "replica-0": "READY",
        "replica-1": "DEAD",
        "replica-2": "DEAD",
        "replica-3": "READY",
    }


@operated()
async def test_a_new_replica_that_cannot_take_the_weights_is_replaced_too(setup: OperatedFleet) -> None:
    await setup.fleet.lose("replica-1", DIED)
    while "replica-2" not in setup.replicas:
        await asyncio.sleep(1)
    setup.replicas["replica-2"]._engine.errors["stage"] = OSError("disk full")  # pyright: ignore
    await asyncio.sleep(2 * START_S)
    assert setup.states()["replica-2"] == "DEAD" and setup.states()["replica-3"] == "READY"
    assert setup.told[2:4] == [
        "replica-2 is out of service: stage on replica-2 failed: OSError: disk full",
        "replica-2 is given up: replica-2 could not be brought to the current weights",
    ]


@operated()
async def test_what_an_operator_adds_serves_once_it_has_the_weights_and_can_be_removed_while_it_starts(
    setup: OperatedFleet,
) -> None:
    assert setup.operator.add(2) == ["replica-2", "replica-3"]
    await asyncio.sleep(1)
    await setup.operator.remove("replica-3")
    await asyncio.sleep(START_S)
    assert setup.router.healthy == ["replica-0", "replica-1", "replica-2"]
    assert "start of replica-3 cancelled" in setup.events
    rows = [(row.name, row.state, row.global_steps, row.node is not None) for row in setup.operator.rows()]
    assert rows == [*((f"replica-{i}", "READY", 7, True) for i in range(3)), ("replica-3", "DEAD", -1, False)]
    assert setup.operator.rows()[3].why == "removed by the operator"
    assert setup.fleet.gauges()["rollout/replicas_lost"] == 0


@operated()
async def test_a_draining_replica_finishes_what_it_has_gets_no_updates_and_ends(setup: OperatedFleet) -> None:
    assert [await setup.router.acquire(1) for _ in range(2)] == ["replica-0", "replica-1"]
    group = start_group(setup.replicas["replica-1"], 20)
    await asyncio.sleep(2)
    await setup.operator.drain("replica-1")
    assert [row.state for row in setup.operator.rows()] == ["READY", "DRAINING"]
    assert setup.operator.rows()[1].running == 1
    setup.source.global_steps = 8
    await setup.manager.update_weights(8)
    assert setup.source.orders[-1][0] == {"replica-0": 1}
    assert await setup.router.acquire(1) == "replica-0"
    (completion,) = await group
    assert len(completion.token_ids) == 20 and set(completion.token_ids) == {7}
    setup.router.release("replica-1", 1)
    await asyncio.sleep(1)
    assert setup.states()["replica-1"] == "DEAD" and len(setup.fleet.replicas) == 2, "and nothing replaces it"
    assert setup.told == ["replica-1 drains", "replica-1 leaves: drained"]


@operated()
async def test_who_drains_for_too_long_leaves_as_if_removed(setup: OperatedFleet) -> None:
    await setup.router.acquire(1)
    await setup.operator.drain("replica-0")
    await asyncio.sleep(DRAIN_S + 1)
    assert setup.told[-1] == "replica-0 leaves: not drained within rollout.group_timeout_s=100"


@operated(min_replicas=2)
async def test_what_is_refused(setup: OperatedFleet) -> None:
    for ask in (setup.operator.drain, setup.operator.remove):
        with pytest.raises(FleetRefusalError, match="^replica-9: there is no such replica; there are replica-0, r"):
            await ask("replica-9")
        with pytest.raises(FleetRefusalError) as refused:
            await ask("replica-1")
        reason = "replica-1 cannot go: 1 replicas would be left, rollout.min_replicas=2"
        assert str(refused.value) == reason
    setup.operator.add(1)
    with pytest.raises(FleetRefusalError, match="replica-1 cannot go"):
        await setup.operator.remove("replica-1")
    await asyncio.sleep(START_S + 1)
    await setup.operator.remove("replica-1")
    with pytest.raises(FleetRefusalError, match="^replica-1 cannot be removed: it has ended already$"):
        await setup.operator.remove("replica-1")
    with pytest.raises(FleetRefusalError, match="^replica-1 cannot be drained: it has ended already$"):
        await setup.operator.drain("replica-1")
    setup.operator.add(1)
    with pytest.raises(FleetRefusalError, match="^replica-3 cannot be drained: it is still starting; remove it, or"):
        await setup.operator.drain("replica-3")
    assert setup.states()["replica-0"] == "READY"


@operated()
async def test_the_state_tells_who_paused_and_why_a_replica_is_gone(setup: OperatedFleet) -> None:
    """While paused no speed is shown: the last one would look as if it still generated."""
    group = start_group(setup.replicas["replica-1"], 1000)
    await asyncio.sleep(30)
    assert setup.operator.rows()[1].tokens_per_s > 0
    await setup.control.pause(PauseMode.keep, by="127.0.0.1:4711 (curl/8.5.0)")
    await setup.fleet.lose("replica-0", DIED)
    dead, paused, starting = setup.operator.rows()
    assert (dead.state, dead.why) == ("DEAD", "out of memory")
    assert (paused.state, paused.running, paused.tokens_per_s, starting.state) == ("PAUSED", 1, 0.0, "STARTING")
    assert paused.why is not None and paused.why.startswith("paused (keep) by 127.0.0.1:4711 (curl/8.5.0) since 20")
    await setup.control.resume()
    assert [row.state for row in setup.operator.rows()] == ["DEAD", "READY", "STARTING"]
    assert setup.operator.rows()[1].why is None
    group.cancel()
