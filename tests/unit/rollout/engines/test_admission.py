"""Who gets into an engine, and in which order. Schedules of all kinds are in test_admission_schedules."""

import asyncio

import pytest

from rollout.engines.admission import Admission
from tests.support.fakes import settle


def come(admission: Admission, name: str, width: int = 1) -> asyncio.Task[bool]:
    return asyncio.create_task(admission.enter(name, width))


async def fill(admission: Admission, *names: str) -> None:
    for name in names:
        assert await admission.enter(name)
        admission.submitted(name)


# -- seats -------------------------------------------------------------------------------------------------------------


async def test_those_without_a_seat_get_in_as_others_leave_first_come_first_served() -> None:
    admission = Admission(2)
    await fill(admission, "a", "b")
    waiting = {name: come(admission, name) for name in "cde"}
    await settle()
    assert admission.inside == ["a", "b"]
    admission.leave("b")
    assert admission.inside == ["a", "c"]
    admission.leave("b")  # twice is once
    admission.leave("a")
    assert admission.inside == ["c", "d"]
    assert await waiting["c"] and await waiting["d"] and not waiting["e"].done()
    admission.leave("c")
    assert await waiting["e"]


async def test_nobody_overtakes_a_wide_request_that_waits_for_its_seats() -> None:
    admission = Admission(4)
    await fill(admission, "a", "b")
    wide, narrow = come(admission, "wide", 3), come(admission, "narrow")
    await settle()
    assert not wide.done() and not narrow.done(), "there is a seat for the narrow one, but the wide one was first"
    admission.leave("a")
    assert await wide and not narrow.done()
    admission.leave("b")
    assert await narrow


async def test_a_request_wider_than_the_engine_takes_all_of_it() -> None:
    admission = Admission(3)
    await fill(admission, "a")
    wide, behind = come(admission, "wide", 99), come(admission, "behind")
    await settle()
    admission.leave("a")
    assert await wide and not behind.done()
    admission.leave("wide")
    assert await behind


@pytest.mark.parametrize("how", ["cancelled", "turned away"])
async def test_a_wide_request_that_goes_no_longer_keeps_others_waiting(how: str) -> None:
    admission = Admission(2)
    await fill(admission, "a")
    wide, narrow = come(admission, "wide", 2), come(admission, "narrow")
    await settle()
    if how == "cancelled":
        wide.cancel()
    else:
        assert admission.turn_away({"wide", "a", "unknown"}) == ["wide"]
    assert await narrow and admission.inside == ["a", "narrow"]
    assert wide.cancelled() if how == "cancelled" else await wide is False


async def test_a_seat_given_to_a_request_that_is_cancelled_in_the_same_moment_is_not_lost() -> None:
    admission = Admission(1)
    await fill(admission, "a")
    first, second = come(admission, "b"), come(admission, "c")
    await settle()
    admission.leave("a")
    first.cancel()
    assert await second and admission.inside == ["c"]


async def test_an_id_is_taken_while_its_request_waits_or_is_inside_and_not_afterwards() -> None:
    admission = Admission(1)
    await fill(admission, "a")
    waiting = come(admission, "b")
    await settle()
    for name in "ab":
        with pytest.raises(ValueError, match=f"request {name} is here already: request ids must be unique"):
            await admission.enter(name)
    assert admission.turn_away(None) == ["b"] and await waiting is False
    admission.leave("a")
    await fill(admission, "b")


# -- hold --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["submitted", "failed"])
async def test_a_hold_waits_for_requests_on_their_way_and_lets_nobody_else_in(last: str) -> None:
    admission = Admission(3)
    assert await admission.enter("a") and await admission.enter("b")
    hold, late = asyncio.create_task(admission.hold()), come(admission, "late")
    await settle()
    ends = [lambda: admission.submitted("a"), lambda: admission.leave("b")]
    if last == "submitted":
        ends.reverse()
    ends[0]()
    await settle()
    assert not hold.done()
    ends[1]()
    await hold
    assert admission.inside == ["a"] and not late.done()
    admission.release()
    assert await late


async def test_holds_add_up_and_a_cancelled_one_does_not_count() -> None:
    admission = Admission(3)
    await admission.hold()
    await admission.hold()
    late = come(admission, "late")
    admission.release()
    await settle()
    assert not late.done()
    admission.release()
    assert await late
    hold, later = asyncio.create_task(admission.hold()), come(admission, "later")
    await settle()
    assert not hold.done() and not later.done(), "the late one has not been submitted"
    hold.cancel()
    assert await later


async def test_emptied_waits_for_those_inside_and_not_for_those_who_wait() -> None:
    admission = Admission(2)
    await fill(admission, "a", "b")
    await admission.hold()
    late, emptied = come(admission, "late"), asyncio.create_task(admission.emptied())
    admission.leave("a")
    await settle()
    assert not emptied.done()
    admission.leave("b")
    await emptied
    assert not late.done() and admission.turn_away(None) == ["late"]
