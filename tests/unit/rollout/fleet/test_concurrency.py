"""The number of trajectories that a replica has at once: what changes it, what it comes to, and what is measured."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.rollout import Concurrency, RolloutConfig
from rollout.fleet.concurrency import (
    LOSS,
    AdaptiveConcurrency,
    ConcurrencyController,
    Look,
    Window,
    make_concurrency,
)
from rollout.fleet.fleet import ReplicaFleet
from rollout.progress import ProgressReport
from rollout.router import max_inflight

FULL = Window(rate=1000.0, again=0.0, kv_usage=0.5, waiting=3.0)
CROWD = replace(FULL, again=0.5)
ROOM = replace(FULL, waiting=0.0)


def decide(controller: ConcurrencyController, *windows: Window) -> list[int]:
    return [controller.decide(window) for window in windows]


def test_it_falls_until_the_cache_holds_what_was_computed_and_stays_there_if_that_pays() -> None:
    controller = ConcurrencyController(72, 16, 520)
    assert decide(controller, CROWD, CROWD, CROWD) == [54, 40, 30]
    assert decide(controller, replace(FULL, rate=1200), FULL) == [30, 30]


def test_a_fall_that_does_not_pay_is_taken_back_and_tried_again_after_four_times_as_long() -> None:
    controller = ConcurrencyController(72, 16, 520)
    assert decide(controller, CROWD, replace(FULL, rate=900)) == [54, 72]
    assert decide(controller, *[CROWD] * 4) == [72, 72, 72, 54]
    far_slower = replace(CROWD, rate=1000 * (1 - LOSS) - 1)
    assert controller.decide(far_slower) == 72, "slow tools leave the engine idle: no need to look further down"


def test_it_rises_while_seats_are_free_by_steps_that_are_halved_where_they_do_not_pay() -> None:
    controller = ConcurrencyController(80, 16, 520)
    assert decide(controller, ROOM, replace(ROOM, rate=1200)) == [100, 100]
    assert decide(controller, ROOM, ROOM) == [125, 100]
    assert decide(controller, ROOM, ROOM) == [112, 100]
    assert decide(controller, ROOM, ROOM) == [106, 100]
    assert decide(controller, *[ROOM] * 5) == [100, 100, 100, 106, 100], "the least step, and less often"


def test_a_full_engine_gets_no_more() -> None:
    assert decide(ConcurrencyController(80, 16, 520), FULL, replace(ROOM, kv_usage=0.95)) == [80, 80]


WINDOWS = st.builds(
    Window, rate=st.floats(0, 1e5), again=st.floats(0, 2), kv_usage=st.floats(0, 2), waiting=st.floats(0, 50)
)


@given(st.lists(WINDOWS, max_size=60), st.integers(1, 50), st.integers(1, 600), st.integers(1, 600))
def test_whatever_is_measured_the_number_stays_within_its_bounds(
    windows: list[Window], least: int, first: int, most: int
) -> None:
    controller = ConcurrencyController(first, least, most)
    for limit in decide(controller, *windows):
        assert min(least, first) <= limit <= max(most, first)


def replica(limit: int, fits: int, tool_s: float, again_s: float, seats: int, turn_s: float = 1.3) -> Window:
    """Return what a replica does with so many episodes. A turn takes `turn_s` on an idle engine and a tool comes after
    it. When more than `fits` have room on it, turns are computed again, which holds up all others for `again_s`."""
    again = min(1.0, max(0.0, (limit - fits) / (0.3 * fits)))
    low, high = 0.0, 2000.0
    for _ in range(25):  # the turns per second of a closed queue, by bisection
        rate = (low + high) / 2
        free = 1 - rate * again_s * again
        is_reached = free > 0 and rate * (tool_s + turn_s / free) <= limit and rate * turn_s / free <= min(seats, fits)
        low, high = (rate, high) if is_reached else (low, rate)
    inside = low * turn_s / max(1e-9, 1 - low * again_s * again)
    waiting = limit - seats if inside > 0.99 * seats else 0
    return Window(rate=low, again=again, kv_usage=inside / fits, waiting=waiting)


@pytest.mark.parametrize(("fits", "seats"), [(26, 64), (60, 64), (150, 256), (1000, 256)])
@pytest.mark.parametrize("tool_s", [0.1, 1.0, 5.0])
def test_on_a_queue_it_comes_within_5_percent_of_the_best_number(fits: int, seats: int, tool_s: float) -> None:
    most = max_inflight(seats, 8, 8)
    controller = ConcurrencyController(max_inflight(seats, 8), 16, most)
    rates = list[float]()
    for _ in range(100):
        window = replica(controller.limit, fits, tool_s, 0.15, seats)
        rates.append(window.rate)
        controller.decide(window)
    best = max(replica(limit, fits, tool_s, 0.15, seats).rate for limit in range(16, most, seats // 10))
    assert sum(rates[50:]) / 50 >= 0.95 * best


# -- what is measured --------------------------------------------------------------------------------------------------


class Recorded(ConcurrencyController):
    """Keeps the windows, and does as it is told."""

    def __init__(self, *limits: int):
        super().__init__(limits[0], 1, 1000)
        self.windows, self._next = list[Window](), list(limits[1:])

    def decide(self, window: Window) -> int:
        self.windows.append(window)
        if self._next:
            self.limit = self._next.pop(0)
        return self.limit


def feed(concurrency: AdaptiveConcurrency, name: str, first: int, last: int, **changes: Any) -> None:
    """Look at a replica every second, which has 16 trajectories, begins one a second and samples 100 tokens."""
    for second in range(first, last + 1):
        look = Look(
            time=second, in_flight=16, assigned=second, tokens=100 * second, turns=2 * second, again=second, waiting=4
        )
        concurrency.take(name, replace(look, **changes))


def test_a_window_begins_when_all_trajectories_have_begun_since_the_last_change_and_is_as_long() -> None:
    controller = Recorded(16)
    concurrency = AdaptiveConcurrency(controller, group_size=4, window_s=10)
    feed(concurrency, "a", 0, 31)
    assert controller.windows == []
    feed(concurrency, "a", 32, 32)
    assert controller.windows == [Window(rate=100, again=0.5, kv_usage=0.0, waiting=4)]


def test_time_below_the_limit_or_above_it_or_paused_says_nothing() -> None:
    controller = Recorded(16)
    concurrency = AdaptiveConcurrency(controller, group_size=4, window_s=10)
    feed(concurrency, "a", 0, 100, in_flight=12)  # there is room for a group: no prompt came
    feed(concurrency, "a", 101, 200, in_flight=17)  # more than a lower limit will leave
    feed(concurrency, "a", 201, 300, is_paused=True)
    assert controller.windows == []
    feed(concurrency, "a", 301, 340)
    assert len(controller.windows) == 1


def test_after_a_fall_a_window_begins_when_the_surplus_has_ended() -> None:
    controller = Recorded(16, 15)
    concurrency = AdaptiveConcurrency(controller, group_size=4, window_s=10)
    feed(concurrency, "a", 0, 32)
    assert len(controller.windows) == 1 and concurrency.limit == 15
    feed(concurrency, "a", 33, 100)  # 16 are still there
    feed(concurrency, "a", 101, 115, in_flight=15)
    assert len(controller.windows) == 1
    feed(concurrency, "a", 116, 116, in_flight=15)
    assert len(controller.windows) == 2


def test_after_a_rise_the_new_trajectories_grow_old_first() -> None:
    controller = Recorded(16, 20)
    concurrency = AdaptiveConcurrency(controller, group_size=4, window_s=10)
    feed(concurrency, "a", 0, 32)
    feed(concurrency, "a", 33, 33 + 39, in_flight=20)
    assert len(controller.windows) == 1
    feed(concurrency, "a", 73, 73, in_flight=20)
    assert len(controller.windows) == 2


def test_all_replicas_are_in_a_window_and_the_rate_is_that_of_one() -> None:
    controller = Recorded(16)
    concurrency = AdaptiveConcurrency(controller, group_size=4, window_s=10)
    for second in range(40):
        feed(concurrency, "a", second, second)
        feed(concurrency, "b", second, second, tokens=300 * second)
    assert controller.windows and all(window.rate == pytest.approx(200, rel=0.05) for window in controller.windows)


async def test_the_fleet_feeds_it_with_every_report_and_waiters_find_the_new_room() -> None:
    async def progress(known: object) -> ProgressReport:
        return ProgressReport(
            tokens=1, running=4, paused=False, busy_s=1.0, request_s=1.0, deltas=(), turns=9, computed_again=3
        )

    looks = list[Look]()

    class Raised(AdaptiveConcurrency):
        def take(self, name: str, look: Look) -> int:
            looks.append(look)
            return 8

    members: Any = [SimpleNamespace(name="a", kill=lambda: None, progress=progress)]
    concurrency = Raised(ConcurrencyController(4, 4, 8), group_size=4)
    fleet = ReplicaFleet(members, 4, 1, lambda _: None, serving=0, concurrency=concurrency)
    await fleet.router.acquire(4)
    waiter = asyncio.create_task(fleet.router.acquire(4))
    await asyncio.sleep(0)
    assert not waiter.done() and fleet.router.gauges()["rollout/concurrency"] == 4
    await fleet.collect_progress()
    assert await waiter == "a" and fleet.router.gauges()["rollout/concurrency"] == 8
    [look] = looks
    assert (look.in_flight, look.assigned, look.turns, look.again) == (4, 4, 9, 3)


def test_the_config_says_whether_the_number_is_fixed() -> None:
    rollout = RolloutConfig(max_num_seqs=64, episodes_per_seat=3)
    assert make_concurrency(rollout, 8) == (200, None)
    limit, concurrency = make_concurrency(replace(rollout, concurrency=Concurrency.auto), 8)
    assert concurrency is not None and concurrency.limit == limit == 200
