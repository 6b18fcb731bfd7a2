"""What holds wait for, and a race. Who gets in, and in which order, is in test_admission_schedules."""

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


@pytest.mark.parametrize("leaves_first", [True, False])
async def test_a_seat_given_to_a_request_that_is_cancelled_in_the_same_moment_is_not_lost(leaves_first: bool) -> None:
    admission = Admission(1)
    await fill(admission, "a")
    first, second = come(admission, "b"), come(admission, "c")
    await settle()
    if leaves_first:
        admission.leave("a")
    first.cancel()
    admission.leave("a")
    assert await second and admission.inside == ["c"]


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
