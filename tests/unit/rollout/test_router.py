"""The least loaded replica with room, first come first served, and no room that is lost."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import NoReplicaLeftError
from rollout.router import ReplicaRouter, max_inflight
from tests.support.fakes import run_virtual, settle


def in_flight(router: ReplicaRouter) -> float:
    return router.gauges()["rollout/inflight_trajectories"]


async def test_a_group_goes_to_the_least_loaded_replica() -> None:
    router = ReplicaRouter(["a", "b"], max_inflight=100)
    assert await router.acquire(8) == "a"
    assert await router.acquire(2) == "b"
    assert await router.acquire(2) == "b"
    assert await router.acquire(2) == "b"
    router.release("a", 8)
    assert await router.acquire(2) == "a"
    assert in_flight(router) == 8


async def test_a_preferred_replica_is_taken_while_it_is_in_service_and_has_room() -> None:
    router = ReplicaRouter(["a", "b"], max_inflight=4)
    assert await router.acquire(3, prefer="b") == "b"
    assert await router.acquire(1, prefer="b") == "b", "though a is idle"
    assert await router.acquire(1, prefer="b") == "a", "b is full"
    router.release("b", 4)
    await router.eject("b", RuntimeError("gone"))
    assert await router.acquire(1, prefer="b") == "a"


async def test_idle_replicas_take_turns() -> None:
    router = ReplicaRouter(["a", "b", "c"], max_inflight=4)
    taken = []
    for _ in range(6):
        taken.append(await router.acquire(4))
        router.release(taken[-1], 4)
    assert taken == ["a", "b", "c", "a", "b", "c"]


async def test_first_come_first_served_also_behind_a_big_group() -> None:
    """Small groups that would fit do not overtake the big one, or it would starve."""
    router = ReplicaRouter(["a"], max_inflight=8)
    await router.acquire(4)
    await router.acquire(2)
    served = []

    async def acquire(count: int) -> None:
        await router.acquire(count)
        served.append(count)

    waiters = [asyncio.create_task(acquire(count)) for count in (4, 2, 1)]
    await settle()
    assert served == [], "there is room for 2 and for 1, but the 4 came first"
    router.release("a", 4)
    await settle()
    assert served == [4, 2]
    router.release("a", 4)
    await asyncio.gather(*waiters)
    assert served == [4, 2, 1]


async def test_a_group_above_the_limit_waits_for_an_idle_replica() -> None:
    router = ReplicaRouter(["a", "b"], max_inflight=8)
    assert [await router.acquire(1), await router.acquire(1)] == ["a", "b"]
    waiter = asyncio.create_task(router.acquire(20))
    await settle()
    assert not waiter.done()
    router.release("b", 1)
    assert await waiter == "b"
    assert await router.acquire(7) == "a"


async def test_with_the_last_replica_removed_every_waiter_is_told_every_error() -> None:
    router = ReplicaRouter(["a", "b"], max_inflight=1)
    assert [await router.acquire(1), await router.acquire(1)] == ["a", "b"]
    waiters = [asyncio.create_task(router.acquire(1)) for _ in range(3)]
    await settle()
    await router.remove("a", RuntimeError("out of memory"))
    await settle()
    assert not any(waiter.done() for waiter in waiters)
    await router.remove("b", ValueError("wrong checksum"))
    for outcome in await asyncio.gather(*waiters, return_exceptions=True):
        assert isinstance(outcome, NoReplicaLeftError)
        assert "a: RuntimeError('out of memory')" in str(outcome)
        assert "b: ValueError('wrong checksum')" in str(outcome)


async def test_while_one_may_come_back_a_group_waits_for_it() -> None:
    router = ReplicaRouter(["a", "b"], max_inflight=4)
    await router.eject("a", RuntimeError("not verified"))
    await router.remove("b", RuntimeError("torn"))
    waiter = asyncio.create_task(router.acquire(4))
    await settle()
    assert not waiter.done() and router.healthy == []
    await router.admit("a")
    assert await waiter == "a"


async def test_a_removed_replica_never_comes_back() -> None:
    router = ReplicaRouter(["a", "b"], max_inflight=4)
    await router.acquire(4)
    await router.remove("a", RuntimeError("torn"))
    router.release("a", 4)
    await router.eject("a", RuntimeError("late news"))
    await router.admit("a")
    assert router.healthy == ["b"] and in_flight(router) == 0
    assert await router.acquire(4) == "b"


def test_a_replica_is_given_more_than_it_has_seats_for_so_that_none_stays_empty() -> None:
    assert max_inflight(max_num_seqs=64, group_size=8) == 136
    assert max_inflight(max_num_seqs=64, group_size=8, per_seat=6) == 392


@pytest.mark.parametrize(("max_num_seqs", "group_size"), [(64, 8), (4, 8), (4, 9), (1, 64)])
async def test_a_group_that_is_tried_again_finds_room_beside_the_next_one_that_waits_for_its_slot(
    max_num_seqs: int, group_size: int
) -> None:
    router = ReplicaRouter(["a"], max_inflight(max_num_seqs, group_size))
    for _ in range(2):
        async with asyncio.timeout(1):
            assert await router.acquire(group_size) == "a"


@pytest.mark.parametrize("cancel_late", [False, True])
async def test_a_cancelled_waiter_takes_no_room_and_holds_up_nobody(cancel_late: bool) -> None:
    """The first in the queue, and the one behind it, are cancelled; also in the moment in which there is room."""
    router = ReplicaRouter(["a"], max_inflight=1)
    await router.acquire(1)
    waiters = [asyncio.create_task(router.acquire(1)) for _ in range(4)]
    await settle()
    if cancel_late:
        router.release("a", 1)
    waiters[0].cancel()
    waiters[1].cancel()
    await settle()
    if not cancel_late:
        router.release("a", 1)
    await settle()
    assert [waiter.done() for waiter in waiters] == [True, True, True, False]
    assert waiters[0].cancelled() and waiters[1].cancelled() and in_flight(router) == 1
    router.release("a", 1)
    assert await waiters[3] == "a"


# Moments at which a group arrives, how many trajectories it has, how long it runs, and when it gives up waiting.
GROUPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(0, 9), st.sampled_from([0, 1, 3, 99])), max_size=15
)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(1, 8), GROUPS, st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=4))
def test_every_schedule(num: int, limit: int, groups: list[tuple[int, ...]], health: list[tuple[int, bool]]) -> None:
    """No replica is ever over its limit, but for one group alone; in the end all room is free, whoever gave up."""

    async def main() -> None:
        names = [f"r{i}" for i in range(num)]
        router = ReplicaRouter(names, limit)
        running: dict[str, list[int]] = {name: [] for name in names}

        async def run_group(arrives: int, count: int, seconds: int, patience: int) -> None:
            await asyncio.sleep(arrives)
            try:
                async with asyncio.timeout(patience):
                    name = await router.acquire(count)
            except TimeoutError:
                return
            assert name in router.healthy
            running[name].append(count)
            assert sum(running[name]) <= limit or running[name] == [count]
            await asyncio.sleep(seconds)
            running[name].remove(count)
            router.release(name, count)

        async def change_health(at: int, healthy: bool) -> None:
            """Change the first replica only, so that there is always one where there are two."""
            await asyncio.sleep(at)
            await (router.admit("r0") if healthy or num == 1 else router.eject("r0", RuntimeError("gone")))

        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                tasks.create_task(run_group(*group))
            for change in health:
                tasks.create_task(change_health(*change))
        assert in_flight(router) == 0

    run_virtual(main())
