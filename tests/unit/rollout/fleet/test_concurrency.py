"""The number of episodes that a replica has at once: what changes it, what it comes to, and what is measured."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.rollout import Concurrency, RolloutConfig
from rollout.fleet.concurrency import (
    AdaptiveConcurrency,
    ConcurrencyController,
    Look,
    Window,
    make_concurrency,
)
from rollout.fleet.fleet import ReplicaFleet
from rollout.progress import ProgressReport
from rollout.router import max_inflight

GROUP, SEATS = 8, 64
FIRST, MOST = max_inflight(SEATS, GROUP), max_inflight(SEATS, GROUP, 8)
CROWDED = Window(rate=650.0, again=0.6, in_flight=136, inside=64, waiting=64, kv_usage=64 / 30)
"""64 seats, room in the cache for 30 episodes, and 8 at their tools."""
KEPT = Window(rate=1200.0, again=0.02, in_flight=28, inside=16, waiting=0, kv_usage=16 / 30)


def make_controller() -> ConcurrencyController:
    return ConcurrencyController(SEATS, FIRST, MOST, GROUP)


def decide(controller: ConcurrencyController, *windows: Window) -> list[int]:
    return [controller.decide(window) for window in windows]


def test_answers_of_one_turn_have_as_many_as_a_fixed_number_allows_however_full_the_cache_is() -> None:
    full = replace(CROWDED, again=0.0, waiting=72, kv_usage=4.0)
    assert decide(make_controller(), full, full) == [FIRST, FIRST]


def test_where_conversations_are_computed_again_there_are_as_many_as_the_cache_holds() -> None:
    assert decide(make_controller(), CROWDED, replace(KEPT, in_flight=20)) == [30 + GROUP // 2] * 2


def test_what_the_cache_holds_is_corrected_until_it_is_crowded() -> None:
    controller = make_controller()
    [_, more, fewer, same] = decide(
        controller,
        CROWDED,
        replace(KEPT, again=0.0),
        replace(KEPT, again=0.3),
        replace(KEPT, again=0.0),
    )
    assert more > 34 > fewer == same, "prefixes that are shared are counted for each, and then the cliff is known"


def test_a_while_without_prompts_says_nothing_against_keeping_the_cache() -> None:
    controller = make_controller()
    dip = replace(KEPT, rate=100, in_flight=8, inside=4)
    assert decide(controller, CROWDED, KEPT, *[dip] * 20, KEPT)[-1] < FIRST


def test_where_not_even_two_groups_fit_the_estimate_does_not_sink() -> None:
    controller = make_controller()
    crowded = replace(KEPT, again=0.9, in_flight=16)
    assert decide(controller, CROWDED, *[crowded] * 50)[-1] == 2 * GROUP
    short = replace(KEPT, again=0.0, kv_usage=KEPT.kv_usage / 4)
    assert decide(controller, *[short] * 20)[-1] > 4 * GROUP, "conversations became short"


def test_full_seats_need_no_more_however_many_episodes_are_counted() -> None:
    """A group that travels as one call is counted whole until its longest answer is done."""
    counted = Window(rate=2000, again=0.0, in_flight=134, inside=63.5, waiting=4, kv_usage=0.4)
    assert decide(make_controller(), counted, counted) == [FIRST, FIRST]


def test_a_limit_that_is_not_reached_does_not_rise() -> None:
    slow = Window(rate=540, again=0.0, in_flight=60, inside=6, waiting=0, kv_usage=0.1)
    assert decide(make_controller(), slow, slow) == [FIRST, FIRST], "prompts or slots are missing, not episodes"


def test_more_than_the_cache_holds_are_kept_where_they_sample_more_tokens() -> None:
    first, some = make_controller(), replace(KEPT, again=0.06)
    assert decide(first, CROWDED, KEPT, replace(some, rate=1300.0))[-1] >= 34
    second = make_controller()
    assert decide(second, CROWDED, KEPT, replace(some, rate=1000.0))[-1] < 34


def test_no_more_are_kept_than_fill_the_seats() -> None:
    controller = make_controller()
    waiting = Window(rate=1200.0, again=0.0, in_flight=100, inside=64, waiting=20, kv_usage=0.5)
    assert decide(controller, CROWDED, *[waiting] * 10)[-1] <= 64 * 80 // 64 + GROUP


def test_the_candidate_that_samples_fewer_tokens_is_given_up() -> None:
    controller = make_controller()
    slower = replace(KEPT, rate=500, in_flight=30)
    assert max(decide(controller, CROWDED, *[slower] * 4)) < 40, "it has some windows, since one may be slow by chance"
    assert decide(controller, slower, CROWDED, CROWDED) == [FIRST * 30 // 16] * 3
    limits = decide(controller, *[replace(CROWDED, rate=400)] * 6)
    assert limits[-1] < 40, "now it promises more than there is"


def test_with_slow_tools_there_are_enough_for_every_seat_and_the_cache_is_left_alone() -> None:
    slow = Window(rate=540, again=0.6, in_flight=136, inside=28, waiting=0, kv_usage=28 / 30)
    assert decide(make_controller(), slow, slow) == [MOST, MOST]


WINDOWS = st.builds(
    Window,
    rate=st.floats(0, 1e5),
    again=st.floats(0, 1),
    in_flight=st.floats(0, 600),
    inside=st.floats(0, 64),
    waiting=st.floats(0, 500),
    kv_usage=st.floats(0, 3),
)


@given(st.lists(WINDOWS, max_size=40))
def test_whatever_is_measured_the_number_stays_within_its_bounds(windows: list[Window]) -> None:
    for limit in decide(make_controller(), *windows):
        assert 2 * GROUP <= limit <= MOST


def replica(limit: float, fits: int, tool_s: float, again_s: float, seats: int, turn_s: float = 1.3) -> Window:
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
    waiting = max(0.0, limit - inside - low * tool_s)
    return Window(
        rate=low, again=again, in_flight=limit, inside=inside, waiting=waiting, kv_usage=inside / fits if inside else 0
    )


@pytest.mark.parametrize(("fits", "seats"), [(26, 64), (60, 64), (150, 256), (1000, 256)])
@pytest.mark.parametrize("tool_s", [0.1, 1.0, 5.0, 20.0])
def test_on_a_queue_it_comes_close_to_the_best_number(fits: int, seats: int, tool_s: float) -> None:
    most = max_inflight(seats, GROUP, 8)
    controller = ConcurrencyController(seats, max_inflight(seats, GROUP), most, GROUP)
    rates = list[float]()
    for _ in range(100):
        window = replica(controller.limit - GROUP / 2, fits, tool_s, 0.15, seats)
        rates.append(window.rate)
        controller.decide(window)
    best = max(replica(limit, fits, tool_s, 0.15, seats).rate for limit in range(16, most, seats // 10))
    # Where keeping the cache and filling the seats come to the same, a number between them may be better than both.
    assert sum(rates[20:]) / 80 >= 0.94 * best


# -- what is measured --------------------------------------------------------------------------------------------------


class Recorded(ConcurrencyController):
    """Keeps the windows, and does as it is told."""

    def __init__(self, *limits: int):
        super().__init__(SEATS, limits[0], 1000, 4)
        self.windows, self._next = list[Window](), list(limits[1:])

    def decide(self, window: Window) -> int:
        self.windows.append(window)
        if self._next:
            self.limit = self._next.pop(0)
        return self.limit


def feed(concurrency: AdaptiveConcurrency, name: str, first: int, last: int, **changes: Any) -> None:
    """Look at a replica every second, which has 16 episodes, begins one a second and samples 100 tokens."""
    for second in range(first, last + 1):
        look = Look(
            time=second,
            in_flight=16,
            assigned=second,
            tokens=100 * second,
            turns=2 * second,
            again=second,
            inside=8,
            waiting=4,
            kv_usage=0.5,
        )
        concurrency.take(name, replace(look, **changes))


def test_a_window_begins_when_all_episodes_have_begun_since_the_last_change_and_is_as_long() -> None:
    controller = Recorded(16)
    concurrency = AdaptiveConcurrency(controller, window_s=10)
    feed(concurrency, "a", 0, 31)
    assert controller.windows == []
    feed(concurrency, "a", 32, 32)
    assert controller.windows == [Window(rate=100, again=0.5, in_flight=16, inside=8, waiting=4, kv_usage=0.5)]


def test_time_above_the_limit_or_paused_says_nothing() -> None:
    controller = Recorded(16)
    concurrency = AdaptiveConcurrency(controller, window_s=10)
    feed(concurrency, "a", 0, 100, in_flight=17)  # more than a lower limit will leave
    feed(concurrency, "a", 101, 200, is_steady=False)
    assert controller.windows == []
    feed(concurrency, "a", 201, 240)
    assert len(controller.windows) == 1


def test_after_a_fall_a_window_begins_when_the_surplus_has_ended() -> None:
    controller = Recorded(16, 15)
    concurrency = AdaptiveConcurrency(controller, window_s=10)
    feed(concurrency, "a", 0, 32)
    assert len(controller.windows) == 1 and concurrency.limit == 15
    feed(concurrency, "a", 33, 100)  # 16 are still there
    feed(concurrency, "a", 101, 114, in_flight=15)
    assert len(controller.windows) == 1
    feed(concurrency, "a", 115, 115, in_flight=15)
    assert len(controller.windows) == 2


def test_after_a_rise_the_new_episodes_grow_old_first() -> None:
    controller = Recorded(16, 20)
    concurrency = AdaptiveConcurrency(controller, window_s=10)
    feed(concurrency, "a", 0, 32)
    feed(concurrency, "a", 33, 33 + 38, in_flight=20)
    assert len(controller.windows) == 1
    feed(concurrency, "a", 72, 72, in_flight=20)
    assert len(controller.windows) == 2


def test_all_replicas_are_in_a_window_and_the_rate_is_that_of_one() -> None:
    controller = Recorded(16)
    concurrency = AdaptiveConcurrency(controller, window_s=10)
    for second in range(40):
        feed(concurrency, "a", second, second)
        feed(concurrency, "b", second, second, tokens=300 * second)
    assert controller.windows and all(window.rate == pytest.approx(200, rel=0.05) for window in controller.windows)


async def test_the_fleet_feeds_it_with_every_report_and_waiters_find_the_new_room() -> None:
    async def progress(known: object) -> ProgressReport:
        return ProgressReport(
            tokens=1, running=3, paused=False, busy_s=1.0, request_s=1.0, deltas=(), turns=9, computed_again=2
        )

    looks = list[Look]()

    class Raised(AdaptiveConcurrency):
        def take(self, name: str, look: Look) -> int:
            looks.append(look)
            return 8

    members: Any = [SimpleNamespace(name="a", kill=lambda: None, progress=progress)]
    concurrency = Raised(ConcurrencyController(4, 4, 8, 4))
    fleet = ReplicaFleet(members, 4, 1, lambda _: None, serving=0, concurrency=concurrency)
    await fleet.router.acquire(4)
    waiter = asyncio.create_task(fleet.router.acquire(4))
    await asyncio.sleep(0)
    assert not waiter.done() and fleet.router.gauges()["rollout/concurrency"] == 4
    await fleet.collect_progress()
    assert await waiter == "a" and fleet.router.gauges()["rollout/concurrency"] == 8
    [look] = looks
    assert (look.in_flight, look.assigned, look.inside, look.turns, look.again) == (4, 4, 3, 9, 2)
    async with fleet.router.visit("a"):
        await fleet.collect_progress()
    await fleet.router.eject("a", RuntimeError("evaluates"))
    await fleet.collect_progress()
    assert [look.is_steady for look in looks] == [True, False, False], "what evaluates or leaves says nothing"


def test_the_config_says_whether_the_number_is_fixed() -> None:
    rollout = RolloutConfig(max_num_seqs=64, episodes_per_seat=3)
    assert make_concurrency(replace(rollout, concurrency=Concurrency.fixed), 8) == (200, None)
    limit, concurrency = make_concurrency(replace(rollout, concurrency=Concurrency.auto), 8)
    assert concurrency is not None and concurrency.limit == limit == 200
