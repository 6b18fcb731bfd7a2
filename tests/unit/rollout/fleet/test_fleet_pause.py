"""Orders to the whole fleet when a replica does not answer, and when orders cross."""

import asyncio

import pytest

from configs.schema import PauseMode
from rollout.errors import FleetPauseError
from rollout.replica.pause import PauseInterruptedError
from rollout.replica.replica import ReplicaStatus
from tests.support.fakes import ClockedEngine, answer, make_replica, now, run_virtual, settle, start_group
from tests.unit.rollout.fleet.test_fleet import Setup, on_fleet
from tests.unit.rollout.http.test_control import fleet_client


def stop_answering(setup: Setup, name: str, error: Exception | None = None) -> None:
    """To any question about its state: its process stands still, or is gone."""

    async def status() -> ReplicaStatus:
        if error is not None:
            raise error
        await asyncio.sleep(1e9)
        raise AssertionError

    setup.replicas[name].status = status


def answer_late(setup: Setup, name: str, seconds: list[float]) -> None:
    """The first questions about its state, after so long."""
    status = setup.replicas[name].status

    async def late() -> ReplicaStatus:
        if seconds:
            await asyncio.sleep(seconds.pop(0))
        return await status()

    setup.replicas[name].status = late


@pytest.mark.parametrize("error", [None, OSError("its process ended")], ids=["hangs", "gone"])
def test_a_replica_that_does_not_answer_is_named_in_time_and_the_others_go_on(error: Exception | None) -> None:
    async def test(setup: Setup) -> None:
        stop_answering(setup, "b", error)
        group = start_group(setup.replicas["a"], 8)
        began = now()
        with pytest.raises(FleetPauseError) as raised:
            await setup.control.pause(PauseMode.keep, timeout_s=5)
        assert list(raised.value.errors) == ["b"] and now() - began <= 6
        assert answer((await group)[0]) == (8, "stop")
        assert not setup.replicas["a"].is_paused()

    on_fleet(test)


def test_of_a_replica_that_does_not_answer_nothing_is_told_and_the_others_tell() -> None:
    async def test(setup: Setup) -> None:
        stop_answering(setup, "b")
        began = now()
        assert await setup.paused() == {"a": None}
        with pytest.raises(FleetPauseError, match=r"is_paused failed on b: TimeoutError\('reading the state on b"):
            await setup.control.is_paused()
        assert now() - began == 10, "each in rollout.answer_timeout_s"

    on_fleet(test)


def test_over_http_who_does_not_answer_is_named_with_504_and_the_others_are_told_of() -> None:
    async def main() -> None:
        async with fleet_client(ClockedEngine(), ClockedEngine()) as (replicas, client, _):

            async def hang() -> ReplicaStatus:
                await asyncio.sleep(1e9)
                raise AssertionError

            replicas[1].status = hang
            unknown = await client.get("/is_paused")
            reason = "reading the state on r1 took longer than rollout.answer_timeout_s=5.0"
            assert (unknown.status_code, unknown.json()["replicas"]) == (504, {"r1": reason})
            assert (await client.get("/versions")).json() == {"r0": 3}
            metrics = await client.get("/metrics")
            assert metrics.status_code == 200 and 'slipstream_global_steps{replica="r0"} 3.0' in metrics.text

    run_virtual(main())


def test_an_abort_ends_requests_on_the_others_and_names_who_did_not_answer() -> None:
    async def test(setup: Setup) -> None:
        async def abort(request_ids: object = None) -> list[str]:
            raise OSError("its process ended")

        setup.replicas["b"].abort = abort
        group = start_group(setup.replicas["a"], 30)
        await asyncio.sleep(1.5)
        with pytest.raises(FleetPauseError, match="abort, which ended 1 requests elsewhere, failed on b: OSError"):
            await setup.control.abort()
        assert answer((await group)[0]) == (1, "abort")

    on_fleet(test)


def test_a_resume_that_ends_a_wait_leaves_an_open_fleet_that_others_join_open() -> None:
    """It was paused in keep before: what the wait would have gone back to."""

    async def test(setup: Setup) -> None:
        groups = setup.start(30)
        await asyncio.sleep(0.5)
        await setup.control.pause(PauseMode.keep)
        waiting = asyncio.create_task(setup.control.pause(PauseMode.wait))
        await asyncio.sleep(3)
        await setup.control.resume()
        with pytest.raises(FleetPauseError) as raised:
            await waiting
        assert all(isinstance(error, PauseInterruptedError) for error in raised.value.errors.values())
        late = make_replica(setup.fleet.want(), ClockedEngine())
        assert setup.fleet.register(late)
        await setup.control.align(late)
        assert not late.is_paused() and not await setup.control.is_paused()
        await asyncio.gather(*groups.values())

    on_fleet(test)


def test_a_pause_that_fails_takes_nothing_back_of_an_order_that_came_later() -> None:
    """The wait would time out on b; an abort of all comes first, and ends what it waits for on a."""

    async def test(setup: Setup) -> None:
        setup.start(300)
        await settle()
        waiting = asyncio.create_task(setup.control.pause(PauseMode.wait, timeout_s=20))
        await asyncio.sleep(10)
        setup.engines["b"].seconds["freeze"] = 15  # longer than is left for the wait, shorter than for the abort
        setup.replicas["b"]._control._timeout_s = 100
        aborting = asyncio.create_task(setup.control.pause(PauseMode.abort))
        with pytest.raises(FleetPauseError):
            await waiting
        await aborting
        assert await setup.paused() == {"a": "abort", "b": "abort"}
        assert await setup.control.is_paused()

    on_fleet(test)


def test_a_fleet_of_nobody_is_as_it_was_told_to_be() -> None:
    async def test(setup: Setup) -> None:
        await setup.fleet.lose("a", OSError("died"))
        with pytest.raises(Exception, match="0 replicas are left"):
            await setup.fleet.lose("b", OSError("died"))
        assert not await setup.control.is_paused()
        await setup.control.pause(PauseMode.keep)
        assert await setup.control.is_paused()

    on_fleet(test)


def test_a_resume_that_comes_before_a_pause_has_reached_a_replica_stands() -> None:
    async def test(setup: Setup) -> None:
        answer_late(setup, "b", [3])
        pausing = asyncio.create_task(setup.control.pause(PauseMode.keep))
        await asyncio.sleep(1)
        await setup.control.resume()
        with pytest.raises(FleetPauseError) as raised:
            await pausing
        assert [type(error) for error in raised.value.errors.values()] == [PauseInterruptedError]
        assert await setup.paused() == {"a": None, "b": None} and not await setup.control.is_paused()

    on_fleet(test)


def test_of_pauses_that_overlap_and_fail_nothing_is_left() -> None:
    """A client that tries again while b hangs."""

    async def test(setup: Setup) -> None:
        answer_late(setup, "b", [100, 100])
        pausing = [asyncio.create_task(setup.control.pause(PauseMode.keep, timeout_s=5))]
        await asyncio.sleep(2)
        pausing.append(asyncio.create_task(setup.control.pause(PauseMode.keep, timeout_s=5)))
        for pause in pausing:
            with pytest.raises(FleetPauseError):
                await pause
        assert await setup.paused() == {"a": None, "b": None} and not await setup.control.is_paused()
        late = make_replica(setup.fleet.want(), ClockedEngine())
        assert setup.fleet.register(late)
        await setup.control.align(late)
        assert not late.is_paused()

    on_fleet(test)
