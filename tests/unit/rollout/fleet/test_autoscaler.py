"""The number of replicas that a run asks for: what raises and lowers it, what is taken back, and what never happens."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from rollout.fleet.autoscaler import GAIN, IDLE, LATE, PATIENCE, WAITS, Autoscaler, Autoscaling, Window
from rollout.replica.lifecycle import FleetMember
from tests.support.fleets import OperatedFleet, operated

WAITING = Window(replicas=2, wait=0.4, has_surplus=False)
BALANCED = replace(WAITING, wait=(IDLE + WAITS) / 2)
SATED = replace(WAITING, wait=0.0, has_surplus=True)


def decide(scaler: Autoscaler, *windows: Window) -> list[int]:
    return [scaler.decide(window) for window in windows]


def test_what_lasts_changes_the_number_and_what_does_not_last_does_not() -> None:
    assert decide(Autoscaler(1, 8), WAITING, WAITING) == [2, 4], "2 / (1 - 0.4)"
    assert decide(Autoscaler(1, 8), SATED, SATED) == [2, 1]
    assert decide(Autoscaler(1, 8), WAITING, BALANCED, WAITING, SATED, SATED) == [2, 2, 2, 2, 1]
    assert decide(Autoscaler(1, 3), WAITING, WAITING) == [2, 3]
    assert decide(Autoscaler(2, 8), SATED, SATED, SATED) == [2, 2, 2]
    assert decide(Autoscaler(1, 8), replace(WAITING, wait=0.9), replace(WAITING, wait=0.9)) == [2, 4], "not more"
    assert decide(Autoscaler(1, 8), *[replace(SATED, has_surplus=False)] * 9) == [2] * 9, "the buffer is just kept full"
    assert decide(Autoscaler(1, 8), *[replace(BALANCED, has_surplus=True)] * 9) == [2] * 9, "now and then it waits"
    at_most = decide(Autoscaler(1, 2), WAITING, WAITING, replace(WAITING, wait=0.6), SATED, SATED)
    assert at_most == [2, 2, 2, 2, 1], "what could not be tried puts nothing off"


def test_a_change_that_does_not_pay_is_taken_back_and_tried_again_after_twice_as_long() -> None:
    scaler = Autoscaler(1, 8)
    assert decide(scaler, WAITING, WAITING) == [2, 4]
    as_slow = replace(WAITING, replicas=4, wait=1 - 0.6 * (1 + GAIN / 2))
    assert scaler.decide(as_slow) == 2, "it waits for the slowest trajectory, say"
    assert decide(scaler, *[WAITING] * 4) == [2, 2, 2, 4]
    faster = replace(WAITING, replicas=4, wait=0.05)
    assert decide(scaler, faster, faster, faster) == [4, 4, 4], "and stays where it pays"
    assert decide(scaler, *[replace(WAITING, replicas=4)] * 2) == [4, 7], "the next one does not wait longer"


def test_a_replica_that_is_missed_comes_back() -> None:
    scaler = Autoscaler(1, 8)
    assert decide(scaler, SATED, SATED) == [2, 1]
    assert scaler.decide(replace(SATED, replicas=1, wait=0.05)) == 2


def test_nothing_more_is_asked_for_while_replicas_are_on_their_way_and_those_are_given_up_that_nobody_needs() -> None:
    scaler = Autoscaler(1, 8)
    assert decide(scaler, WAITING, WAITING) == [2, 4]
    coming = replace(WAITING, coming=2)
    assert decide(scaler, *[coming] * 5) == [4] * 5
    assert decide(scaler, *[replace(SATED, coming=2)] * PATIENCE) == [4, 2]


def test_what_finds_no_room_is_given_up_after_a_while_and_what_came_is_judged() -> None:
    before = Window(replicas=8, wait=0.5, has_surplus=False)
    scaler = Autoscaler(1, 16)
    assert decide(scaler, before, before) == [8, 16]
    partly = replace(before, replicas=9, wait=0.49, coming=7)
    assert decide(scaler, *[partly] * LATE) == [16] * (LATE - 1) + [9]
    assert scaler.decide(replace(partly, coming=0)) == 8, "the ninth did not pay"
    assert decide(scaler, *[before] * 8) == [8] * 7 + [16], "neither did it to ask: twice as long, twice"


def test_the_replacement_of_a_lost_replica_is_waited_for_without_an_end() -> None:
    scaler = Autoscaler(1, 2)
    assert decide(scaler, WAITING, WAITING) == [2, 2]
    assert decide(scaler, *[replace(WAITING, replicas=1, coming=1)] * (LATE + 1)) == [2] * (LATE + 1)
    assert decide(Autoscaler(1, 2), *[replace(SATED, replicas=1, coming=1)] * 2) == [2, 1], "unless nobody needs it"


def test_replicas_that_nobody_here_asked_for_are_not_part_of_a_trial() -> None:
    for on_their_way in ([], [replace(BALANCED, coming=4)] * (LATE + 1)):
        scaler = Autoscaler(1, 8)
        assert decide(scaler, WAITING, WAITING) == [2, 4]
        assert decide(scaler, *on_their_way) == [6] * len(on_their_way)
        assert scaler.decide(replace(WAITING, replicas=6, wait=0.39)) == 6, "a person made it 6"


@given(
    least=st.integers(1, 4),
    more=st.integers(0, 12),
    need=st.lists(st.floats(0.3, 12.0), min_size=1, max_size=4),
)
def test_it_stays_within_its_bounds_settles_for_every_load_and_leaves_no_trainer_waiting_that_it_could_help(
    least: int, more: int, need: list[float]
) -> None:
    """`need`: the replicas that the trainer keeps busy, which change now and then."""
    most, scaler, count = least + more, Autoscaler(least, least + more), least
    for needed in need:
        counts = list[int]()
        for _ in range(300):
            speed = min(1.0, count / needed)
            window = Window(replicas=count, wait=1 - speed, has_surplus=count > needed)
            count = scaler.decide(window)
            assert least <= count <= most
            counts.append(count)
        enough = min(most, max(least, math.ceil(needed * (1 - WAITS))))
        late = counts[150:]
        changes = sum(before != after for before, after in zip(late, late[1:], strict=False))
        assert changes <= 8, "a trial now and then, and no swinging"
        assert sum(count >= enough for count in late) >= 0.9 * len(late)
        assert sum(late) / len(late) <= max(least, math.ceil(needed)) + 1.2


class Fed:
    """A buffer between a trainer and replicas of which so many are needed."""

    def __init__(self, setup: OperatedFleet, needed: int):
        self._setup, self._needed, self._waited = setup, needed, 0.0
        self.num_trained, self.ledger = 0, self
        self.window, self.capacity, self.groups_per_step, self.num_ready = self, 4, 2, 0

    def waited_s(self) -> float:
        return self._waited

    async def train(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            speed = min(1.0, len(self._setup.router.healthy) / self._needed)
            self.num_trained += 1
            self._waited += 1 - speed
            self.num_ready = 2 * (len(self._setup.router.healthy) > self._needed)


@asynccontextmanager
async def scaled(setup: OperatedFleet, needed: int = 3) -> AsyncIterator[None]:
    fed = Fed(setup, needed)
    scaling = Autoscaling(operator=setup.operator, buffer=cast(Any, fed), scaler=Autoscaler(1, 8))
    tasks = [asyncio.create_task(scaling.run()), asyncio.create_task(fed.train())]
    yield
    for task in tasks:
        task.cancel()


@operated()
async def test_replicas_are_added_and_drained_through_the_operator(setup: OperatedFleet) -> None:
    async with scaled(setup):
        await asyncio.sleep(300)
        assert setup.states() == {name: "READY" for name in ("replica-0", "replica-1", "replica-2")}
        assert any("replica-2 to be added: the trainer waits 33% of the time for 2" in text for text in setup.told)
        setup.operator.add(1)  # by a person: it is not needed
        await asyncio.sleep(300)
        assert setup.states()["replica-3"] == "DEAD" and len(setup.router.healthy) == 3
        assert "replica-3 drains" in setup.told and any("replica-3 to go: " in text for text in setup.told)


@operated()
async def test_the_time_of_an_evaluation_does_not_count_and_ends_no_window(setup: OperatedFleet) -> None:
    async def evaluate() -> None:
        while True:
            await asyncio.sleep(7.5)
            pinned = await setup.fleet.pin(1, "it evaluates")
            await asyncio.sleep(2.0)
            await setup.manager.catch_up(pinned, setup.fleet.unpin)

    async with scaled(setup):
        evaluating = asyncio.create_task(evaluate())
        await asyncio.sleep(300)
        assert any("to be added: the trainer waits 33% of the time for 2" in text for text in setup.told)
        evaluating.cancel()


@operated(min_replicas=2)
async def test_the_successor_of_a_replica_that_is_needed_until_it_comes_is_not_given_up(setup: OperatedFleet) -> None:
    """The machine of replica-1 is about to leave the cluster, and the trainer could do with one replica."""
    start = setup.operator.start

    async def slowly(name: str) -> FleetMember:
        await asyncio.sleep(1000)
        return await start(name)

    setup.operator.start = slowly
    setup.fleet.want_successor("replica-1")
    async with scaled(setup, needed=1):
        await asyncio.sleep(300)
        assert setup.states() == {"replica-0": "READY", "replica-1": "READY", "replica-2": "STARTING"}


@operated(max_replacements=2)
async def test_when_losses_are_not_replaced_any_more_none_is_added(setup: OperatedFleet) -> None:
    setup.failures = [RuntimeError("no such model") for _ in range(100)]
    async with scaled(setup):
        await asyncio.sleep(2000)
        assert setup.events[-1].startswith("start replica-4"), "one that was added, and two in its place"
        assert [text for text in setup.told if "rollout.autoscale" in text][1:] == [
            "a loss is not replaced (rollout.max_replacements=2), and so the number of replicas follows the load no "
            "more (rollout.autoscale.max_replicas)"
        ]
