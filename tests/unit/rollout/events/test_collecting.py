"""Events on their way to the driver: one clock, nothing twice, and what is lost is counted."""

import logging
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.events.clock import RemoteClock
from rollout.events.driver import DriverEvents
from rollout.events.event import Emit, Stamped
from rollout.events.kinds import ClockMeasured, EventsDropped, GroupClaimed, Noticed
from rollout.events.log import MOST_KEPT, EventLog, Notices
from trainer.tracking.events.kinds import Resumed, UpdateStarted

TICK = UpdateStarted(global_steps=7)


class Hands:
    """A clock that is set by hand."""

    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def collecting() -> tuple[list[Stamped], DriverEvents, Hands, EventLog, Hands]:
    """The driver at 1000.0, a process whose own clock stands at 3.0."""
    stamped, clock, remote = list[Stamped](), Hands(1000.0), Hands(3.0)
    return stamped, DriverEvents(stamped.extend, clock), clock, EventLog(remote), remote


def test_events_of_a_process_are_on_the_drivers_clock() -> None:
    """Asked at 1000.0, answered at 1000.2 at 3.5 of its clock: that was 1000.1, give or take 0.1."""
    stamped, events, clock, log, remote = collecting()
    log.emit(TICK)  # at 3.0
    remote.now, sent_at = 3.5, clock.now
    batch = log.take()
    clock.now = 1000.2
    events.take("replica-0", batch, sent_at)
    measured, tick = stamped
    assert measured.event == ClockMeasured(process="replica-0", offset_s=996.6, error_s=pytest.approx(0.1))
    assert tick == Stamped(pytest.approx(999.6), "replica-0", TICK)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8), st.floats(-1e6, 1e6))
def test_the_error_of_a_clock_is_never_more_than_it_says(trips: list[tuple[float, float]], truth: float) -> None:
    clock, now = RemoteClock(), 100.0
    for there, back in trips:
        clock.measure(sent_at=now, remote=now + there - truth, answered=now + there + back)
        now += there + back + 1.0
        assert clock.offset is not None
        assert abs(clock.to_driver(0.0) - truth) <= clock.offset.error_at(now) + 1e-6


def test_a_shorter_round_trip_counts_and_an_old_one_wears_out() -> None:
    clock = RemoteClock()
    assert clock.measure(sent_at=0.0, remote=0.0, answered=2.0)
    assert clock.measure(sent_at=10.0, remote=9.0, answered=10.1)
    assert not clock.measure(sent_at=20.0, remote=19.0, answered=21.0)
    assert clock.measure(sent_at=20_000.0, remote=19_999.0, answered=20_001.0)  # two seconds of drift later


def test_what_is_lost_on_the_way_is_counted() -> None:
    stamped, events, _, log, _ = collecting()
    for _ in range(3):
        log.emit(TICK)
    log.take()  # an answer that never came
    log.emit(TICK)
    events.take("replica-0", log.take(), 1000.0)
    assert [each.event for each in stamped[1:]] == [EventsDropped(count=3, total=3, why="process"), TICK]
    assert events.num_lost == 3


def test_a_process_that_nobody_asks_keeps_the_newest() -> None:
    log = EventLog(Hands())
    for ordinal in range(MOST_KEPT + 2):
        log.emit(Resumed(global_steps=ordinal))
    batch = log.take()
    assert (batch.first, len(batch.events), batch.events[-1]) == (2, MOST_KEPT, Resumed(global_steps=MOST_KEPT + 1))
    assert log.take().first == MOST_KEPT + 2


def test_another_process_under_the_same_name_begins_anew() -> None:
    stamped, events, clock, log, _ = collecting()
    log.emit(TICK)
    events.take("agent-worker-0", log.take(), clock.now)
    events.begins_anew("agent-worker-0")
    other = EventLog(Hands(500.0))
    other.emit(TICK)
    events.take("agent-worker-0", other.take(), clock.now)
    assert [each.time for each in stamped if each.event == TICK] == [1000.0, 1000.0] and events.num_lost == 0


@pytest.mark.parametrize("is_on", [True, False])
def test_without_events_only_the_rare_ones_of_the_driver_are_kept(is_on: bool) -> None:
    stamped = list[Stamped]()
    events, log = DriverEvents(stamped.extend, is_on=is_on), EventLog(is_on=is_on)
    emits: list[Callable[..., None]] = [events.emit, log.emit]
    for emit in emits:
        emit(GroupClaimed(ordinal=1, replica="replica-0"))
        emit(TICK)
    assert [type(each.event) for each in stamped] == ([GroupClaimed] if is_on else []) + [UpdateStarted]
    assert len(log.take().events) == 2 * is_on


def test_in_another_process_nobody_listens() -> None:
    """An agent loop may send its task to processes of its own."""
    log = EventLog()
    emit: Emit = pickle.loads(pickle.dumps(log.emit))
    emit(TICK)
    assert log.take().events == ()


def test_a_person_is_shown_what_a_process_warns_of() -> None:
    stamped, shown = list[Stamped](), list[str]()
    events, log, source = DriverEvents(stamped.extend, show=shown.append), EventLog(), logging.getLogger("a.retriever")
    source.addHandler(handler := Notices(log))
    source.info("it was asked for %d documents", 3)
    source.warning("it is down after %d failures", 3)
    source.removeHandler(handler)
    events.take("agent-worker-0", log.take(), events.clock())
    assert shown == ["agent-worker-0: it is down after 3 failures"]
    assert stamped[-1].event == Noticed("it is down after 3 failures")
