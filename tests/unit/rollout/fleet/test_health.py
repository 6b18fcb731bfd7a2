"""Who is lost though its process lives: invented clocks, and the reports of replicas with known speeds."""

import statistics
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.fleet.health import LARGE, HealthMonitor
from rollout.progress import ProgressReport
from rollout.replica.lifecycle import Replica, Speed

TIMEOUT_S = 60.0


class Judge:
    """A health monitor and the records of replicas that it is asked about, by name."""

    def __init__(self, slow_factor: float | None):
        self._health = HealthMonitor(TIMEOUT_S, slow_factor)
        self._replicas: dict[str, Replica] = {}

    def observe(self, name: str, now: float, report: ProgressReport | None) -> str | None:
        replica = self._replicas.setdefault(name, Replica(name=name))
        return self._health.observe(replica, now, report, self._replicas.values())

    def speed(self, name: str) -> Speed | None:
        watch = self._replicas[name].watch
        return None if watch is None or not watch.is_measured else watch.speed


def report(tokens: int, running: int = 4, paused: bool = False, busy_s: float = 0.0) -> ProgressReport:
    """`busy_s`: so long it has had requests, as many as now."""
    return ProgressReport(
        tokens=tokens, running=running, paused=paused, busy_s=busy_s, request_s=busy_s * running, deltas=()
    )


def observed(health: Judge, reports: list[ProgressReport | None], interval_s: float = 1.0) -> list[float]:
    """At which of the seconds 0, interval_s, ... replica "a" was found lost."""
    return [
        i * interval_s for i, answer in enumerate(reports) if health.observe("a", i * interval_s, answer) is not None
    ]


def test_updates_go_on_without_a_replica_after_a_third_of_its_deadline_that_no_standstill_of_the_driver_fills() -> None:
    health, replica = HealthMonitor(TIMEOUT_S, None), Replica(name="a")
    health.observe(replica, 0, report(0))
    health.observe(replica, 500, None)
    assert replica.watch is not None and replica.watch.silence is None
    assert [health.observe(replica, at, None) for at in (501, 502, 503, 504)] == [None] * 4
    assert replica.watch.silence is None
    health.observe(replica, 505, None)
    assert replica.watch.silence == "no answer for 20 s (rollout.replica_timeout_s=60)"
    health.observe(replica, 506, report(1))
    assert replica.watch.silence is None


def test_a_silent_replica_is_lost_at_the_deadline_after_its_last_answer() -> None:
    health = Judge(None)
    assert observed(health, [report(0), report(9), *[None] * 70])[0] == 61
    assert health.observe("a", 72, None) == "no answer for 71 s (rollout.replica_timeout_s=60)"
    assert health.observe("a", 73, report(9)) is None, "an answer ends the silence"
    assert [health.observe("a", at, None) for at in range(74, 133)] == [None] * 59


@pytest.mark.parametrize(
    ("rest", "lost_at"),
    [
        (report(9), 61),
        (report(9, paused=True), None),
        (report(9, running=0), None),
    ],
    ids=["runs", "paused", "idle"],
)
def test_requests_that_run_without_a_token_are_a_hang(rest: ProgressReport, lost_at: float | None) -> None:
    found = observed(Judge(None), [report(0), report(9), *[rest] * 70])
    assert found[:1] == ([] if lost_at is None else [lost_at])


def test_one_token_or_a_pause_begins_the_deadline_anew() -> None:
    for between in (report(10), report(9, paused=True), report(9, running=0)):
        last = report(between.tokens)
        assert observed(Judge(None), [*[report(9)] * 50, between, *[last] * 59]) == []


def test_who_stood_still_himself_does_not_blame_the_replicas() -> None:
    """The driver was stopped for an hour: of the silence and of the tokens that did not come it knows nothing."""
    for after in (None, report(9)):
        health = Judge(None)
        assert observed(health, [report(9), report(9)]) == []
        assert health.observe("a", 3600, after) is None
        assert health.observe("a", 3601, after) is None


def run_fleet(
    health: Judge, speeds: dict[str, float], running: dict[str, int], seconds: int = 40
) -> dict[str, tuple[int, str]]:
    """Replicas at `speeds` tokens/s per request for so many seconds: who was lost when, and why."""
    lost: dict[str, tuple[int, str]] = {}
    for now in range(seconds):
        for name, speed in speeds.items():
            tokens = round(speed * running[name] * now)
            busy_s = now if running[name] else 0
            reason = health.observe(name, now, report(tokens, running[name], busy_s=busy_s))
            if reason is not None:
                lost.setdefault(name, (now, reason))
    return lost


def test_a_replica_ten_times_slower_than_the_others_is_lost_once_a_window_is_measured() -> None:
    health = Judge(8.0)
    lost = run_fleet(health, {"a": 20.0, "b": 2.0, "c": 24.0}, {"a": 4, "b": 4, "c": 4})
    reason = "2 tokens/s per request, the median of the others is 20 (rollout.slow_factor=8)"
    assert lost == {"b": (30, reason)}, "of the others c, asked after it, is not measured long enough yet"
    assert health.speed("b") == Speed(8.0, 2.0)


def test_one_that_is_slow_is_found_although_it_has_kept_more_requests_than_the_others() -> None:
    lost = run_fleet(Judge(8.0), {"a": 20.0, "b": 2.0}, {"a": 4, "b": 16})
    assert lost["b"][0] == 30, "32 tokens/s of 16 requests against 80 of 4"


@pytest.mark.parametrize(
    ("speeds", "running", "factor"),
    [
        ({"a": 20.0, "b": 2.0}, {"a": 4, "b": 4}, None),
        ({"a": 20.0, "b": 2.6}, {"a": 4, "b": 4}, 8.0),
        ({"a": 20.0, "b": 2.0}, {"a": 4, "b": 64}, 8.0),  # 128 tokens/s of 64 requests against 80 of 4
        ({"a": 20.0, "b": 2.0}, {"a": 4, "b": 20}, 8.0),  # 40 against 80
        ({"a": 20.0, "b": 20.0}, {"a": 64, "b": 1}, 8.0),
        ({"a": 20.0, "b": 2.0}, {"a": 0, "b": 4}, 8.0),
        ({"b": 2.0}, {"b": 4}, 8.0),
    ],
    ids=["off", "less than the factor", "busier", "half in all", "fewer requests", "others idle", "alone"],
)
def test_who_is_not_slow(speeds: dict[str, float], running: dict[str, int], factor: float | None) -> None:
    assert run_fleet(Judge(factor), speeds, running) == {}


def test_in_a_large_fleet_the_slow_one_is_lost_and_the_speeds_are_compared_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Comparing each with each would take the driver more than a core with a thousand replicas."""
    num_medians, median = 0, statistics.median

    def counted(values: Iterable[float]) -> float:
        nonlocal num_medians
        num_medians += 1
        return median(values)

    monkeypatch.setattr("rollout.fleet.health.statistics.median", counted)
    speeds = {f"replica-{index}": 20.0 for index in range(100)} | {"replica-50": 2.0}
    lost = run_fleet(Judge(8.0), speeds, dict.fromkeys(speeds, 4), seconds=40)
    assert list(lost) == ["replica-50"] and lost["replica-50"][0] == 30
    assert num_medians <= 2 * (LARGE + 10), "once for each of the first, and then once a second"


def test_pauses_count_for_no_speed() -> None:
    health = Judge(8.0)
    tokens = 0
    for now in range(31):
        paused = now % 3 == 0
        tokens += 0 if paused else 30
        health.observe("a", now, report(tokens, 3, paused, busy_s=now))
    assert health.speed("a") is None, "one second of three is between two reports that were not paused"


def test_others_that_stand_idle_are_compared_as_they_were() -> None:
    """The trainer waits for the slow one, so they have nothing to do."""
    health = Judge(8.0)
    run_fleet(health, {"a": 20.0}, {"a": 4})
    lost = [
        now
        for now in range(40, 200)
        if health.observe("a", now, replace(report(3120, busy_s=39), running=0))
        or health.observe("b", now, report(2 * now, busy_s=now))
    ]
    assert lost[0] == 70, "its first window"


def test_others_that_are_done_before_anybody_looks_are_as_fast_as_they_were_meanwhile() -> None:
    """The slow one has most of the work. The other gets four requests every second, and has done them in half of it:
    whenever it is asked, none runs."""
    health = Judge(8.0)
    lost = []
    for now in range(100):
        quick = replace(report(40 * now, busy_s=now / 2), running=0)
        lost += [health.observe("a", now, quick), health.observe("b", now, report(4 * now, busy_s=now))]
    reasons = [reason for reason in lost if reason is not None]
    assert lost.index(reasons[0]) == 2 * 60 + 1, "its window: 30 s of having requests"
    assert reasons[0] == "1 tokens/s per request, the median of the others is 20 (rollout.slow_factor=8)"
    assert health.speed("a") == Speed(80.0, 20.0)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1.0, 50.0),
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.floats(0.5, 2.0), st.integers(1, 64)), min_size=2),
    st.integers(1, 4),
)
def test_replicas_of_like_speed_are_never_lost(
    speed: float, replicas: dict[str, tuple[float, int]], pause_every: int
) -> None:
    """Each within a factor of two of a speed, whatever its load, with pauses in between."""
    health = Judge(8.0)
    for now in range(60):
        paused = pause_every > 1 and now % (5 * pause_every) == 0
        for name, (factor, running) in replicas.items():
            answer = report(round(100 + speed * factor * running * now), running, paused, now)
            assert health.observe(name, now, answer) is None
