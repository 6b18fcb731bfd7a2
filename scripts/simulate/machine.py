"""The cores that engines and trainer share, where there are not enough for all."""

import asyncio
from collections.abc import Callable

from scripts.simulate.profile import Profile


class Machine:
    """Keeps who works now, and how much slower everybody is for it. Without shared cores nobody slows anybody."""

    def __init__(self, profile: Profile, num_ranks: int):
        self._profile = profile
        self._num_ranks = num_ranks
        self._engines = 0
        self._training = False
        self._waiting: set[Callable[[], None]] = set()

    def slowdown(self) -> float:
        """Return the cores that all who work ask for over those that there are, at least 1."""
        profile = self._profile
        if not profile.cores:
            return 1.0
        cores = self._engines * profile.engine_cores + self._training * self._num_ranks * profile.rank_cores
        return max(1.0, cores / profile.cores)

    def engine_works(self, works: bool) -> None:
        self._engines += 1 if works else -1
        self._tell()

    def training(self, trains: bool) -> None:
        self._training = trains
        self._tell()

    def _tell(self) -> None:
        if self._profile.cores:
            for wake in list(self._waiting):
                wake()

    async def sleep(self, seconds: float, waker: "Waker | None" = None) -> bool:
        """Sleep, and return whether somebody woke it before its time: `waker`, or a change of who works."""
        waker = waker or Waker()
        self._waiting.add(waker.wake)
        try:
            return await waker.sleep(seconds)
        finally:
            self._waiting.discard(waker.wake)

    async def work(self, seconds: float) -> None:
        """Work that takes so long where nothing else works."""
        clock = asyncio.get_running_loop().time
        left = seconds
        while left > 1e-12:
            factor, began = self.slowdown(), clock()
            if not await self.sleep(left * factor):
                return
            left -= (clock() - began) / factor


class Waker:
    """A sleep that can be ended."""

    def __init__(self) -> None:
        self._future: asyncio.Future[bool] | None = None

    async def sleep(self, seconds: float) -> bool:
        """Sleep, and return whether it was woken."""
        loop = asyncio.get_running_loop()
        future = self._future = loop.create_future()
        timer = loop.call_later(seconds, self._end, future, False)
        try:
            return await future
        finally:
            timer.cancel()
            self._future = None

    def wake(self) -> None:
        if self._future is not None:
            self._end(self._future, True)

    @staticmethod
    def _end(future: asyncio.Future[bool], woken: bool) -> None:
        if not future.done():
            future.set_result(woken)
