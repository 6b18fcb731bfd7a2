"""Orders and questions to the whole fleet, also when a replica does not answer and when orders cross."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import PauseMode
from rollout.errors import FleetPauseError, PauseConflictError
from rollout.fleet.control import RETRY_S, FleetControl
from rollout.replica.replica import RolloutReplica
from tests.support.fakes import ClockedEngine, answer, make_replica, now, settle, start_group
from tests.support.fleets import FleetSetup, on_fleet
from tests.support.http_clients import fleet_client
from weight_sync.protocol import ReplicaStatus


def stop_answering(setup: FleetSetup, name: str, error: Exception | None = None) -> None:
    """To any question about its state: its process stands still, or is gone."""

    async def status() -> ReplicaStatus:
        if error is not None:
            raise error
        await asyncio.sleep(1e9)
        raise AssertionError

    setup.replicas[name].status = status


def answer_late(setup: FleetSetup, name: str, seconds: list[float]) -> None:
    """The first questions about its state, after so long."""
    status = setup.replicas[name].status

    async def late() -> ReplicaStatus:
        if seconds:
            await asyncio.sleep(seconds.pop(0))
        return await status()

    setup.replicas[name].status = late


async def join(setup: FleetSetup) -> RolloutReplica:
    """Bring another replica into the fleet, in the state that the fleet is in."""
    late = make_replica(setup.fleet.want(), ClockedEngine())
    assert setup.fleet.register(late)
    await setup.control.align(late)
    return late


def uncancelled(call: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """Make a call that goes on when its caller is cancelled."""

    async def shielded(*args: Any) -> None:
        await asyncio.shield(asyncio.create_task(call(*args)))

    return shielded


# -- pause, resume, abort ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "complete_at", "tokens"),
    [(PauseMode.keep, 3, (6, "stop")), (PauseMode.wait, 6, (6, "stop")), (PauseMode.abort, 3, (2, "abort"))],
)
@on_fleet()
async def test_a_pause_is_complete_when_it_is_complete_on_every_replica(
    setup: FleetSetup, mode: PauseMode, complete_at: int, tokens: tuple[int, str]
) -> None:
    group = start_group(setup.replicas["b"], 6)
    await asyncio.sleep(2.5)
    await setup.control.pause(mode, clear_cache=True)
    assert now() == complete_at and await setup.control.is_paused()
    assert await setup.paused() == {"a": mode.value, "b": mode.value}
    assert all("freeze clearing the cache" in engine.events for engine in setup.engines.values())
    frozen = setup.start(2, prefix="frozen ")
    await asyncio.sleep(50)
    assert not any(task.done() for task in frozen.values())
    await setup.control.resume()
    assert not await setup.control.is_paused()
    assert [answer((await task)[0]) for task in frozen.values()] == [(2, "stop")] * 2
    assert answer((await group)[0]) == tokens


@pytest.mark.parametrize("hangs", [False, True])
@on_fleet(num_replicas=3)
async def test_when_one_does_not_pause_the_others_go_on_and_it_is_named(setup: FleetSetup, hangs: bool) -> None:
    groups = setup.start(5)
    await setup.replicas["c"].pause(PauseMode.keep)
    setup.engines["b"].errors["freeze"], setup.engines["b"].seconds["freeze"] = OSError("no"), 1e6 if hangs else 0
    with pytest.raises(FleetPauseError, match=r"^pause\(keep\) failed on b: ") as raised:
        await setup.control.pause(PauseMode.keep, timeout_s=7)
    reason = "pause(keep) on b took longer than timeout_s=7" if hangs else "no"
    assert {name: str(error) for name, error in raised.value.errors.items()} == {"b": reason}
    assert await setup.paused() == {"a": None, "b": None, "c": "keep"}, "c was paused before"
    assert [answer((await groups[name])[0]) for name in "ab"] == [(5, "stop")] * 2
    assert not groups["c"].done()


@on_fleet()
async def test_one_that_cannot_be_resumed_after_a_failed_pause_is_named_too(setup: FleetSetup) -> None:
    setup.engines["b"].errors["freeze"] = OSError("cannot freeze")
    setup.engines["a"].errors["thaw"] = OSError("cannot thaw")
    with pytest.raises(FleetPauseError) as raised:
        await setup.control.pause(PauseMode.keep)
    reasons = {name: str(error) for name, error in raised.value.errors.items()}
    assert reasons == {"a": "cannot thaw", "b": "cannot freeze"}


@on_fleet()
async def test_when_one_does_not_resume_the_others_do_and_it_is_named(setup: FleetSetup) -> None:
    await setup.control.pause(PauseMode.keep)
    setup.engines["b"].errors["thaw"] = OSError("no")
    with pytest.raises(FleetPauseError, match=r"^resume failed on b: OSError\('no'\)$"):
        await setup.control.resume()
    assert await setup.paused() == {"a": None, "b": "keep"}
    with pytest.raises(FleetPauseError, match="is_paused failed on b") as raised:
        await setup.control.is_paused()
    assert list(raised.value.errors) == ["b"]
    setup.engines["b"].errors.clear()
    await setup.control.resume()
    assert await setup.paused() == {"a": None, "b": None}


@pytest.mark.parametrize("before", [None, PauseMode.keep])
@on_fleet()
async def test_who_joined_during_a_pause_that_fails_is_as_the_others_are(
    setup: FleetSetup, before: PauseMode | None
) -> None:
    if before is not None:
        await setup.control.pause(before)
    setup.engines["b"].errors["freeze"], setup.engines["b"].seconds["freeze"] = OSError("no"), 5
    pausing = asyncio.create_task(setup.control.pause(PauseMode.wait, timeout_s=60))
    await asyncio.sleep(1)
    late = await join(setup)
    assert late.is_paused()
    with pytest.raises(FleetPauseError, match="OSError"):
        await pausing
    state = None if before is None else "wait"
    assert await setup.paused() == {"a": state, "b": before and before.value, late.name: state}


# -- replicas that do not answer, and orders that cross ---------------------------------------------------------------


@pytest.mark.parametrize("error", [None, OSError("its process ended")], ids=["hangs", "gone"])
@on_fleet()
async def test_a_replica_that_does_not_answer_is_named_in_time_and_the_others_go_on(
    setup: FleetSetup, error: Exception | None
) -> None:
    stop_answering(setup, "b", error)
    group = start_group(setup.replicas["a"], 8)
    began = now()
    with pytest.raises(FleetPauseError) as raised:
        await setup.control.pause(PauseMode.keep, timeout_s=5)
    assert list(raised.value.errors) == ["b"] and now() - began <= 10, "timeout_s and rollout.answer_timeout_s"
    assert answer((await group)[0]) == (8, "stop")
    assert not setup.replicas["a"].is_paused()


async def test_over_http_who_does_not_answer_is_named_with_504_and_the_others_are_told_of() -> None:
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


@on_fleet()
async def test_an_abort_ends_requests_on_the_others_and_names_who_did_not_answer(setup: FleetSetup) -> None:
    async def abort(request_ids: object = None) -> list[str]:
        raise OSError("its process ended")

    setup.replicas["b"].abort = abort
    group = start_group(setup.replicas["a"], 30)
    await asyncio.sleep(1.5)
    with pytest.raises(FleetPauseError, match="abort, which ended 1 requests elsewhere, failed on b: OSError"):
        await setup.control.abort()
    assert answer((await group)[0]) == (1, "abort")


@on_fleet()
async def test_a_resume_that_ends_a_wait_leaves_an_open_fleet_that_others_join_open(setup: FleetSetup) -> None:
    """It was paused in keep before: what the wait would have gone back to."""
    groups = setup.start(30)
    await asyncio.sleep(0.5)
    await setup.control.pause(PauseMode.keep)
    waiting = asyncio.create_task(setup.control.pause(PauseMode.wait))
    await asyncio.sleep(3)
    await setup.control.resume()
    with pytest.raises(FleetPauseError) as raised:
        await waiting
    assert all(isinstance(error, PauseConflictError) for error in raised.value.errors.values())
    assert "a resume came while the pause waited" in str(raised.value)
    late = await join(setup)
    assert not late.is_paused() and not await setup.control.is_paused()
    await asyncio.gather(*groups.values())


@on_fleet()
async def test_a_pause_that_is_refused_leaves_the_pause_that_it_contradicts(setup: FleetSetup) -> None:
    group = start_group(setup.replicas["b"], 6)
    await asyncio.sleep(1.5)
    waiting = asyncio.create_task(setup.control.pause(PauseMode.wait))
    await settle()
    with pytest.raises(FleetPauseError, match="a pause in mode wait is under way: resume first, or pause in mode"):
        await setup.control.pause(PauseMode.keep)
    await waiting
    assert (await setup.paused())["b"] == "wait" and answer((await group)[0]) == (6, "stop")


@on_fleet()
async def test_a_pause_that_fails_takes_nothing_back_of_an_order_that_came_later(setup: FleetSetup) -> None:
    """The wait would time out on b; an abort of all comes first, and ends what it waits for on a."""
    setup.start(300)
    await settle()
    waiting = asyncio.create_task(setup.control.pause(PauseMode.wait, timeout_s=20))
    await asyncio.sleep(10)
    setup.engines["b"].seconds["freeze"] = 15  # longer than is left for the wait, shorter than for the abort
    setup.replicas["b"]._control._timeout_s = 100
    aborting = asyncio.create_task(setup.control.pause(PauseMode.abort, timeout_s=60))
    with pytest.raises(FleetPauseError):
        await waiting
    await aborting
    assert await setup.paused() == {"a": "abort", "b": "abort"}
    assert await setup.control.is_paused()


@pytest.mark.parametrize("late", [PauseMode.wait, PauseMode.abort])
@on_fleet()
async def test_a_pause_that_is_too_late_leaves_the_keep_of_another_client(setup: FleetSetup, late: PauseMode) -> None:
    """Over Ray, a caller that gives up does not cancel the call in the replica."""
    for replica in setup.replicas.values():
        replica.pause = uncancelled(replica.pause)
    setup.start(300)
    await settle()
    await setup.control.pause(PauseMode.keep)
    if late is PauseMode.abort:
        setup.engines["a"].seconds["freeze"] = 1e6
    with pytest.raises(FleetPauseError, match=r"took longer than timeout_s=2"):
        await setup.control.pause(late, timeout_s=2)
    tokens = [engine.usage.tokens for engine in setup.engines.values()]
    await asyncio.sleep(100)
    assert [engine.usage.tokens for engine in setup.engines.values()] == tokens, "nothing moves"
    assert await setup.control.is_paused() and (await setup.paused())["a"] == "keep"
    setup.engines["a"].seconds.clear()
    await setup.control.pause(PauseMode.keep)  # no pause is under way any more


@on_fleet()
async def test_a_fleet_is_paused_from_the_order_on_though_its_replicas_end_their_waits_one_after_another(
    setup: FleetSetup,
) -> None:
    groups = [start_group(setup.replicas["a"], 5), start_group(setup.replicas["b"], 9)]
    await settle()
    waiting = asyncio.create_task(setup.control.pause(PauseMode.wait))
    await settle()
    while not waiting.done():
        assert await setup.control.is_paused()
        await asyncio.sleep(1)
    assert now() >= 9 and all(group.done() for group in groups)


@on_fleet()
async def test_a_fleet_of_nobody_is_as_it_was_told_to_be(setup: FleetSetup) -> None:
    await setup.fleet.lose("a", OSError("died"))
    with pytest.raises(Exception, match="0 replicas are left"):
        await setup.fleet.lose("b", OSError("died"))
    assert not await setup.control.is_paused()
    await setup.control.pause(PauseMode.keep)
    assert await setup.control.is_paused()


@on_fleet()
async def test_a_resume_that_comes_before_a_pause_has_reached_a_replica_stands(setup: FleetSetup) -> None:
    answer_late(setup, "b", [3])
    pausing = asyncio.create_task(setup.control.pause(PauseMode.keep))
    await asyncio.sleep(1)
    await setup.control.resume()
    with pytest.raises(FleetPauseError) as raised:
        await pausing
    assert [type(error) for error in raised.value.errors.values()] == [PauseConflictError]
    assert await setup.paused() == {"a": None, "b": None} and not await setup.control.is_paused()


@on_fleet()
async def test_of_pauses_that_overlap_and_fail_nothing_is_left(setup: FleetSetup) -> None:
    """A client that tries again while b hangs."""
    answer_late(setup, "b", [100, 100])
    pausing = [asyncio.create_task(setup.control.pause(PauseMode.keep, timeout_s=5))]
    await asyncio.sleep(2)
    pausing.append(asyncio.create_task(setup.control.pause(PauseMode.keep, timeout_s=5)))
    for pause in pausing:
        with pytest.raises(FleetPauseError):
            await pause
    assert await setup.paused() == {"a": None, "b": None} and not await setup.control.is_paused()
    late = await join(setup)
    assert not late.is_paused()


# -- counters ----------------------------------------------------------------------------------------------------------


@on_fleet()
async def test_counters_are_summed_and_go_on_counting_what_the_dead_did(setup: FleetSetup) -> None:
    await asyncio.gather(*setup.start(3, 2).values())
    totals = await setup.control.totals()
    assert (totals["trajectories"], totals["tokens"], totals["engine_requests"]) == (4, 10, 4)
    await setup.fleet.lose("b", OSError())
    await start_group(setup.replicas["a"], 1, prefix="later ")
    totals = await setup.control.totals()
    assert (totals["trajectories"], totals["tokens"], totals["engine_requests"]) == (5, 11, 5)


@on_fleet()
async def test_counters_of_a_replica_whose_death_nobody_has_noticed_yet_are_what_it_said_last(
    setup: FleetSetup,
) -> None:
    class Gone(RolloutReplica):
        async def stats(self) -> dict[str, float]:
            raise OSError("its process ended")

    await asyncio.gather(*setup.start(3).values())
    await setup.control.totals()
    setup.replicas["b"].__class__ = Gone
    assert (await setup.control.totals())["tokens"] == 6


@on_fleet()
async def test_gauges_are_of_the_time_since_the_last_call(setup: FleetSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=now)
    monkeypatch.setattr("rollout.replica.replica.time", clock)
    monkeypatch.setattr("rollout.fleet.control.time", clock)
    control = FleetControl(setup.fleet)
    groups = [start_group(setup.replicas["a"], 10, 9), start_group(setup.replicas["b"], 5, 9)]
    await asyncio.sleep(4.5)
    await control.abort({"0-1"})
    await asyncio.sleep(5.5)
    setup.replicas["b"]._counters["cached_tokens"] = 3  # of three prompts that are done, of two tokens each
    assert await control.gauges() == {
        "perf/replica_idle": 0.25,
        "perf/throughput/generated": 2.3,
        "rollout/engine_requests": 4,
        "rollout/aborted": 2,
        "rollout/continued": 0,
        "rollout/prefix_hit_rate": 0.5,
        "rollout/replicas_ready": 2,
        "rollout/replicas_lost": 0,
        "rollout/replicas_replaced": 0,
        "rollout/recovery_s": 0,
        "rollout/inflight_trajectories": 0,
        "rollout/concurrency": 8,
    }
    await asyncio.gather(*groups)
    await asyncio.sleep(10)
    setup.replicas["b"]._counters.update(drafted_tokens=8, accepted_tokens=6)  # as of an engine that drafts
    gauges = await control.gauges()
    assert gauges["perf/replica_idle"] == 1 and gauges["rollout/spec_acceptance"] == 0.75


# -- how long clients may pause a run ----------------------------------------------------------------------------------

LIMIT_S = 20.0


@asynccontextmanager
async def limited(setup: FleetSetup) -> AsyncIterator[None]:
    watch = asyncio.create_task(setup.control.end_long_pauses(LIMIT_S))
    yield
    watch.cancel()


@on_fleet()
async def test_a_run_that_clients_paused_for_too_long_is_resumed_and_this_is_told(setup: FleetSetup) -> None:
    """Another pause meanwhile does not begin the time anew; a resume does."""
    async with limited(setup):
        await setup.control.pause(PauseMode.keep, by="alice")
        await asyncio.sleep(LIMIT_S - 5)
        await setup.control.resume()
        await setup.control.pause(PauseMode.keep, by="alice")
        await asyncio.sleep(LIMIT_S - 5)
        assert await setup.control.is_paused() and "WARNING" not in str(setup.told)
        await setup.control.pause(PauseMode.abort, by="bob")
        await asyncio.sleep(6)
        assert not await setup.control.is_paused()
        warning = "resumed by serve.max_pause_s=20. WARNING: bob had paused the run for longer than that"
        assert setup.told[-2:] == ["paused (abort) by bob", warning], "once, when it is done"
        await asyncio.sleep(10 * LIMIT_S)
        assert setup.told[-1] == warning


@on_fleet()
async def test_a_resume_that_fails_is_told_and_tried_again(setup: FleetSetup) -> None:
    async with limited(setup):
        await setup.control.pause(PauseMode.keep, by="alice")
        setup.engines["a"].errors["thaw"] = OSError("no reply")
        await asyncio.sleep(LIMIT_S + 1)
        assert setup.told[-1].startswith("not resumed by serve.max_pause_s=20. ") and "no reply" in setup.told[-1]
        assert await setup.paused() == {"a": "keep", "b": None}
        setup.engines["a"].errors.clear()
        await asyncio.sleep(RETRY_S)
        assert await setup.paused() == {"a": None, "b": None}
        await setup.control.pause(PauseMode.keep, by="alice")
        setup.engines["a"].errors["thaw"] = OSError("no reply")
        await asyncio.sleep(LIMIT_S + 1)
        setup.engines["a"].errors.clear()
        await setup.control.pause(PauseMode.keep, by="bob")
        await asyncio.sleep(RETRY_S)
        assert await setup.paused() == {"a": "keep", "b": "keep"}, "unless a client has paused it meanwhile"
