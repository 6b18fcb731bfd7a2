"""The replicas as one: paused and resumed together, counted together, and who serves."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import PauseMode
from rollout.engines.base import EngineDiedError
from rollout.errors import FleetPauseError, TooFewReplicasError
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica import ReplicaStatus, RolloutReplica
from rollout.router import ReplicaRouter
from tests.support.fakes import ClockedEngine, answer, make_replica, now, run_virtual, settle, start_group, update


class Setup:
    """Replicas a, b, ... on version 0, with what the fleet told."""

    def __init__(self, num_replicas: int, min_replicas: int):
        names = "abc"[:num_replicas]
        self.told: list[str] = []
        self.router = ReplicaRouter(list(names), max_inflight=8)
        self.engines = {name: ClockedEngine() for name in names}
        self.replicas = {name: make_replica(name, engine) for name, engine in self.engines.items()}
        self.fleet = ReplicaFleet(list(self.replicas.values()), self.router, min_replicas, self.told.append, serving=0)
        self.control = FleetControl(self.fleet)

    def start(self, *lengths: int, prefix: str = "") -> dict[str, asyncio.Task[Any]]:
        """A group on every replica; its requests are a0, a1, ..."""
        return {name: start_group(r, *lengths, prefix=f"{prefix}{name}") for name, r in self.replicas.items()}

    async def paused(self) -> dict[str, str | None]:
        return {status.name: status.pause_mode for status in await self.control.statuses()}


def on_fleet(test: Callable[[Setup], Awaitable[None]], num_replicas: int = 2, min_replicas: int = 1) -> None:
    async def main() -> None:
        setup = Setup(num_replicas, min_replicas)
        for name, replica in setup.replicas.items():
            await update(replica, 0)
            setup.engines[name].events.clear()
        await test(setup)

    run_virtual(main())


# -- pause, resume, abort ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "complete_at", "tokens"),
    [(PauseMode.keep, 3, (6, "stop")), (PauseMode.wait, 6, (6, "stop")), (PauseMode.abort, 3, (2, "abort"))],
)
def test_a_pause_is_complete_when_it_is_complete_on_every_replica(
    mode: PauseMode, complete_at: int, tokens: tuple[int, str]
) -> None:
    async def test(setup: Setup) -> None:
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

    on_fleet(test)


def test_requests_are_aborted_wherever_they_are() -> None:
    async def test(setup: Setup) -> None:
        groups = setup.start(9, 9)
        await asyncio.sleep(2.5)
        assert sorted(await setup.control.abort({"a0", "b1", "unknown"})) == ["a0", "b1"]
        await setup.control.pause(PauseMode.keep)
        assert sorted(await setup.control.abort()) == ["a1", "b0"]
        assert [answer(completion) for completion in await groups["a"]] == [(2, "abort"), (3, "abort")]
        assert [answer(completion) for completion in await groups["b"]] == [(3, "abort"), (2, "abort")]

    on_fleet(test)


@pytest.mark.parametrize("hangs", [False, True])
def test_when_one_does_not_pause_the_others_go_on_and_it_is_named(hangs: bool) -> None:
    async def test(setup: Setup) -> None:
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

    on_fleet(test, num_replicas=3)


def test_one_that_cannot_be_resumed_after_a_failed_pause_is_named_too() -> None:
    async def test(setup: Setup) -> None:
        setup.engines["b"].errors["freeze"] = OSError("cannot freeze")
        setup.engines["a"].errors["thaw"] = OSError("cannot thaw")
        with pytest.raises(FleetPauseError) as raised:
            await setup.control.pause(PauseMode.keep)
        reasons = {name: str(error) for name, error in raised.value.errors.items()}
        assert reasons == {"a": "cannot thaw", "b": "cannot freeze"}

    on_fleet(test)


def test_a_wait_past_its_deadline_names_whose_requests_take_too_long() -> None:
    async def test(setup: Setup) -> None:
        long = start_group(setup.replicas["b"], 30)
        await settle()
        with pytest.raises(FleetPauseError) as raised:
            await setup.control.pause(PauseMode.wait, timeout_s=20)
        assert list(raised.value.errors) == ["b"] and now() == pytest.approx(20)
        assert not await setup.control.is_paused()
        assert answer((await long)[0]) == (30, "stop")

    on_fleet(test)


def test_when_one_does_not_resume_the_others_do_and_it_is_named() -> None:
    async def test(setup: Setup) -> None:
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

    on_fleet(test)


@pytest.mark.parametrize("before", [None, PauseMode.keep])
def test_who_joined_during_a_pause_that_fails_is_as_the_others_are(before: PauseMode | None) -> None:
    async def test(setup: Setup) -> None:
        if before is not None:
            await setup.control.pause(before)
        late = make_replica(setup.fleet.want(), ClockedEngine())
        setup.engines["b"].errors["freeze"], setup.engines["b"].seconds["freeze"] = OSError("no"), 5
        pausing = asyncio.create_task(setup.control.pause(PauseMode.wait))
        await asyncio.sleep(1)
        assert setup.fleet.register(late)
        await setup.control.align(late)
        assert late.is_paused()
        with pytest.raises(FleetPauseError, match="OSError"):
            await pausing
        state = None if before is None else "wait"
        assert await setup.paused() == {"a": state, "b": before and before.value, late.name: state}

    on_fleet(test)


def test_any_client_sees_the_version_and_state_of_every_replica() -> None:
    async def test(setup: Setup) -> None:
        await update(setup.replicas["a"], 4)
        setup.engines["b"].errors["swap"] = OSError()
        with pytest.raises(OSError):
            await update(setup.replicas["b"], 4)
        await setup.replicas["a"].pause(PauseMode.wait)
        assert await setup.control.statuses() == [
            ReplicaStatus(name="a", global_steps=4, pause_mode="wait", torn=False, frozen=True),
            ReplicaStatus(name="b", global_steps=0, pause_mode=None, torn=True, frozen=True),
        ]
        assert await setup.control.is_paused(), "torn is frozen too"

    on_fleet(test)


# -- who serves --------------------------------------------------------------------------------------------------------


def test_an_ejected_replica_goes_on_with_what_it_has_and_comes_back() -> None:
    async def test(setup: Setup) -> None:
        groups = setup.start(5)
        await setup.fleet.eject("b", OSError("not verified"))
        assert setup.router.healthy == ["a"] and [replica.name for replica in setup.fleet.targets] == ["a", "b"]
        assert answer((await groups["b"])[0]) == (5, "stop")
        for _ in range(2):
            await setup.fleet.admit("b", 1)
        assert setup.router.healthy == ["a", "b"]
        assert setup.told == ["b is out of service: not verified", "b is back in service"]

    on_fleet(test)


def test_a_replica_that_is_given_up_is_ended_with_what_it_generates_and_never_comes_back() -> None:
    async def test(setup: Setup) -> None:
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

    on_fleet(test)


@pytest.mark.parametrize(("min_replicas", "enough"), [(1, True), (2, False)])
def test_a_loss_that_leaves_too_few_is_an_error(min_replicas: int, enough: bool) -> None:
    async def test(setup: Setup) -> None:
        error = OSError("out of memory")
        for _ in range(2):  # the watch and a group that ran there tell of the same death
            if enough:
                await setup.fleet.lose("b", error)
            else:
                with pytest.raises(TooFewReplicasError) as raised:
                    await setup.fleet.lose("b", error)
                assert raised.value.__cause__ is error
                assert str(raised.value) == "1 replicas are left in service, rollout.min_replicas=2: out of memory"
        assert setup.told == ["b is given up: out of memory"]

    on_fleet(test, min_replicas=min_replicas)


# -- counters ----------------------------------------------------------------------------------------------------------


def test_counters_are_summed_and_go_on_counting_what_the_dead_did() -> None:
    async def test(setup: Setup) -> None:
        await asyncio.gather(*setup.start(3, 2).values())
        totals = await setup.control.totals()
        assert (totals["trajectories"], totals["tokens"], totals["engine_requests"]) == (4, 10, 4)
        await setup.fleet.lose("b", OSError())
        await start_group(setup.replicas["a"], 1, prefix="later ")
        totals = await setup.control.totals()
        assert (totals["trajectories"], totals["tokens"], totals["engine_requests"]) == (5, 11, 5)

    on_fleet(test)


def test_counters_of_a_replica_whose_death_nobody_has_noticed_yet_are_what_it_said_last() -> None:
    class Gone(RolloutReplica):
        async def stats(self) -> dict[str, float]:
            raise OSError("its process ended")

    async def test(setup: Setup) -> None:
        await asyncio.gather(*setup.start(3).values())
        await setup.control.totals()
        setup.replicas["b"].__class__ = Gone
        assert (await setup.control.totals())["tokens"] == 6

    on_fleet(test)


def test_gauges_are_of_the_time_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(setup: Setup) -> None:
        clock = SimpleNamespace(monotonic=now)
        monkeypatch.setattr("rollout.replica.replica.time", clock)
        monkeypatch.setattr("rollout.fleet.control.time", clock)
        control = FleetControl(setup.fleet)
        groups = [start_group(setup.replicas["a"], 10, 9), start_group(setup.replicas["b"], 5, 9)]
        await asyncio.sleep(4.5)
        await control.abort({"0-1"})
        await asyncio.sleep(5.5)
        setup.replicas["b"]._cached_tokens = 3  # of three prompts that are done, of two tokens each
        assert await control.gauges() == {
            "perf/replica_idle": 0.25,
            "rollout/engine_requests": 4,
            "rollout/aborted": 2,
            "rollout/continued": 0,
            "rollout/prefix_hit_rate": 0.5,
            "rollout/replicas_ready": 2,
            "rollout/replicas_lost": 0,
            "rollout/replicas_replaced": 0,
            "rollout/recovery_s": 0,
            "rollout/inflight_trajectories": 0,
        }
        await asyncio.gather(*groups)
        await asyncio.sleep(10)
        assert (await control.gauges())["perf/replica_idle"] == 1

    on_fleet(test)
