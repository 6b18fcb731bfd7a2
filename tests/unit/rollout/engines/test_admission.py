"""Admission of requests to the seats of an engine: holds, races, and then any schedule at all."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engines.admission import Admission
from tests.support.fakes import run_virtual, settle


def come(admission: Admission, name: str, width: int = 1) -> asyncio.Task[bool]:
    return asyncio.create_task(admission.enter(name, width))


async def fill(admission: Admission, *names: str) -> None:
    for name in names:
        assert await admission.enter(name)
        admission.submitted(name)


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


# -- every schedule ----------------------------------------------------------------------------------------------------


class Crowd:
    """Requests around an admission, what each of them may see, and what must hold of all of them after every step."""

    def __init__(self, num_seats: int):
        self.admission = Admission(num_seats)
        self.num_seats = num_seats
        self.widths: dict[str, int] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.queue: list[str] = []  # all that ever came, in the order in which they should get in
        self.going_on: set[str] = set()
        self.entered: set[str] = set()
        self.submitted: set[str] = set()
        self.past: set[str] = set()  # left, turned away or cancelled
        self.hold_tasks: list[asyncio.Task[None]] = []
        self.num_holds = 0
        self._was_inside: set[str] = set()
        self._was_open = True

    # -- what happens --------------------------------------------------------------------------------------------------

    def enter(self, n: int) -> None:
        name = f"{len(self.widths)}"
        self.widths[name] = min(1 + n // 4, self.num_seats)
        self.tasks[name] = asyncio.create_task(self._come(name, lambda: self.admission.enter(name, 1 + n // 4)))

    def go_on(self, n: int) -> None:
        """Come again as the continuation of a request that was inside before."""
        name = f"{len(self.widths)}"
        self.widths[name] = min(1 + n // 4, self.num_seats)
        self.going_on.add(name)
        self.tasks[name] = asyncio.create_task(
            self._come(name, lambda: self.admission.enter(name, 1 + n // 4, is_continuation=True))
        )

    def enter_twice(self, n: int) -> None:
        """Come under an id that is in use."""
        names = [*self.admission.inside, *self.waiting]
        if names:
            name = names[n % len(names)]
            with pytest.raises(ValueError, match=f"request {name} is here already"):
                self.admission.enter(name).send(None)

    def submit(self, n: int) -> None:
        names = [name for name in self.admission.inside if name in self.entered - self.submitted]
        if names:
            self.submitted.add(names[n % len(names)])
            self.admission.submitted(names[n % len(names)])

    def leave(self, n: int) -> None:
        names = [name for name in self.admission.inside if name in self.entered - self.past]
        if names:
            self.past.add(names[n % len(names)])
            self.admission.leave(names[n % len(names)])

    def cancel(self, n: int) -> None:
        names = [name for name, task in self.tasks.items() if not task.done()]
        if names:
            self.past.add(names[n % len(names)])
            self.tasks[names[n % len(names)]].cancel()

    def turn_away(self, n: int) -> None:
        waiting = self.waiting
        chosen = None if n % 2 or not waiting else {waiting[n % len(waiting)], "unknown"}
        turned = self.admission.turn_away(chosen)
        assert set(turned) >= (set(waiting) if chosen is None else chosen - {"unknown"})
        self.past.update(turned)

    def hold(self, n: int) -> None:
        self.hold_tasks.append(asyncio.create_task(self._hold()))

    def release(self, n: int) -> None:
        """Release a hold, or give up one that is still waiting."""
        if self.hold_tasks:
            task = self.hold_tasks.pop(n % len(self.hold_tasks))
            if task.done():
                task.result()  # raises where somebody was on the way in
                self._release()
            else:
                task.cancel()

    async def _come(self, name: str, enter: Callable[[], Awaitable[bool]]) -> None:
        behind = [other for other in self.waiting if name in self.going_on and other not in self.going_on]
        self.queue.insert(self.queue.index(behind[0]) if behind else len(self.queue), name)
        (self.entered if await enter() else self.past).add(name)

    async def _hold(self) -> None:
        self.num_holds += 1
        try:
            await self.admission.hold()
        except asyncio.CancelledError:
            self._count_release()
            raise
        assert self.submitted >= set(self.admission.inside), "nobody is on the way in"

    def _release(self) -> None:
        self._count_release()
        self.admission.release()

    def _count_release(self) -> None:
        self.num_holds -= 1
        self._was_open |= self.num_holds == 0

    # -- what must hold ------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[str]:
        inside = set(self.admission.inside)
        return [name for name in self.queue if name not in self.past | self.entered | inside]

    def check(self, settled: bool) -> None:
        inside, waiting = self.admission.inside, self.waiting
        free = self.num_seats - sum(self.widths[name] for name in inside)
        assert free >= 0
        new = set(inside) - self._was_inside
        assert not new or self._was_open, "nobody enters while held"
        for name in new:
            assert not set(waiting) & set(self.queue[: self.queue.index(name)]), "nobody overtakes"
        if settled and waiting and not self.num_holds:
            assert self.widths[waiting[0]] > free, "nobody waits beside a seat that is free"
        self._was_inside, self._was_open = set(inside), self.num_holds == 0

    async def drain(self) -> None:
        """Release all holds and let everybody leave: all others must come in."""
        while self.hold_tasks:
            self.release(0)
            await settle()
        await settle()
        while self.waiting or self.admission.inside:
            assert self.admission.inside, "somebody waits although nobody is inside"
            self.check(settled=True)
            for name in self.admission.inside:
                self.past.add(name)
                self.admission.leave(name)
            await settle()
        assert all(task.done() for task in self.tasks.values())
        assert self.entered | self.past == set(self.widths)
        await self.admission.emptied()
        assert await self.admission.enter("last", self.num_seats)


STEPS = st.tuples(
    st.sampled_from(
        [Crowd.enter] * 4
        + [Crowd.submit, Crowd.leave] * 2
        + [Crowd.cancel, Crowd.turn_away, Crowd.hold, Crowd.release]
        + [Crowd.go_on, Crowd.enter_twice]
    ),
    st.integers(0, 9),
    st.sampled_from([0, 1, 2, 20]),
)


@settings(max_examples=200, deadline=None)
@given(num_seats=st.integers(1, 4), steps=st.lists(STEPS, max_size=40))
def test_every_schedule(num_seats: int, steps: list[tuple[Callable[[Crowd, int], None], int, int]]) -> None:
    """`ticks`: for how many turns of the event loop the others get to run before the next step."""

    async def main() -> None:
        crowd = Crowd(num_seats)
        for step, n, ticks in steps:
            step(crowd, n)
            for _ in range(ticks):
                await asyncio.sleep(0)
            crowd.check(settled=ticks == 20)
        await crowd.drain()

    run_virtual(main())
