"""Decides which requests may be inside an engine: as many as it runs at once. Continuations of requests that were
inside before come first, the others in the order of their arrival. While the admission is held, no request enters."""

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Waiter:
    request_id: str
    width: int
    is_continuation: bool
    answer: asyncio.Future[bool]


class Admission:
    """Lets requests in. Between `enter` and `submitted` the weights cannot change, because `hold` waits for all on that
    way: the cache salt that a request gets is that of the live version.

    Example:
        if await admission.enter("7"):    # waits for a seat
            admission.submitted("7")      # to the engine; from here on the weights may change
            admission.leave("7")          # it has generated
    """

    def __init__(self, num_seats: int):
        self.num_seats = num_seats
        self._widths: dict[str, int] = {}  # of all requests inside
        self._taken = 0  # their sum
        self._submitting: set[str] = set()
        self._waiting: deque[_Waiter] = deque()
        self._holds = 0
        self._all_submitted, self._empty = asyncio.Event(), asyncio.Event()
        self._all_submitted.set()
        self._empty.set()

    @property
    def inside(self) -> list[str]:
        return list(self._widths)

    @property
    def waiting(self) -> list[str]:
        return [waiter.request_id for waiter in self._waiting]

    def has(self, request_id: str) -> bool:
        return request_id in self._widths or any(waiter.request_id == request_id for waiter in self._waiting)

    async def enter(self, request_id: str, width: int = 1, is_continuation: bool = False) -> bool:
        """Wait for `width` seats (at most all of them). False when the request was turned away while it waited.
        `is_continuation`: a part of it was inside before. It comes before all those of which none was."""
        if self.has(request_id):
            raise ValueError(f"request {request_id} is here already: request ids must be unique")
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(request_id, min(width, self.num_seats), is_continuation, answer)
        before = sum(other.is_continuation for other in self._waiting) if is_continuation else len(self._waiting)
        self._waiting.insert(before, waiter)
        self._admit()
        try:
            return await answer
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._admit()  # a wide request may have kept a narrow one waiting
            self.leave(request_id)  # let in and cancelled at the same moment
            raise

    def submitted(self, request_id: str) -> None:
        self._submitting.discard(request_id)
        if not self._submitting:
            self._all_submitted.set()

    def leave(self, request_id: str) -> None:
        """Idempotent: a request that was turned away has nothing to give back."""
        self.submitted(request_id)
        if request_id in self._widths:
            self._taken -= self._widths.pop(request_id)
            if not self._widths:
                self._empty.set()
            self._admit()

    def turn_away(self, request_ids: Collection[str] | None) -> list[str]:
        """Answer False to those of `request_ids` that still wait; None is all of them."""
        turned = [w for w in self._waiting if request_ids is None or w.request_id in request_ids]
        for waiter in turned:
            self._waiting.remove(waiter)
            if not waiter.answer.done():  # cancelled at the same moment
                waiter.answer.set_result(False)
        self._admit()  # a wide request may have kept a narrow one waiting
        return [waiter.request_id for waiter in turned]

    async def hold(self) -> None:
        """Let no request in until `release`. Holds add up. Returns when none is between `enter` and `submitted`."""
        self._holds += 1
        try:
            await self._all_submitted.wait()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._holds -= 1
        self._admit()

    async def emptied(self) -> None:
        """Returns when no request is inside."""
        await self._empty.wait()

    def _admit(self) -> None:
        while self._waiting and not self._holds and self._taken + self._waiting[0].width <= self.num_seats:
            waiter = self._waiting.popleft()
            if waiter.answer.done():  # cancelled, but its `enter` has not yet noticed
                continue
            self._widths[waiter.request_id] = waiter.width
            self._taken += waiter.width
            self._submitting.add(waiter.request_id)
            self._all_submitted.clear()
            self._empty.clear()
            waiter.answer.set_result(True)
