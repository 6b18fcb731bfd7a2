"""How many episodes of a group are open, across processes: the driver asks, and is answered when some have ended."""

import asyncio
from math import inf
from weakref import WeakValueDictionary

ANSWER_S = 30.0
"""After so long without news the driver is answered as well, and asks again: no answer is waited for without end."""


class OpenEpisodes:
    """The open episodes of one attempt at a group.

    Example:
        opened = OpenEpisodes()
        opened.tell(5)         # in the agent worker: three of eight have ended
        await opened.below(8)  # 5, for the driver, which knows of eight
    """

    def __init__(self) -> None:
        self._count = inf
        self._changed = asyncio.Event()

    def tell(self, count: int) -> None:
        self._count = count
        self._changed.set()
        self._changed = asyncio.Event()

    async def below(self, known: int) -> int:
        """Wait until fewer than `known` are open. Returns `known` when there is no news for ANSWER_S."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while self._count >= known:
                    await self._changed.wait()
        except TimeoutError:
            return known
        return int(self._count)


class OpenByAttempt:
    """The open episodes of every attempt that somebody runs or asks for: the driver may ask before it begins."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[int, int], OpenEpisodes] = WeakValueDictionary()

    def of(self, ordinal: int, attempt: int) -> OpenEpisodes:
        """Lives as long as a caller holds it."""
        found = self._known.get((ordinal, attempt))
        if found is None:
            found = self._known[ordinal, attempt] = OpenEpisodes()
        return found
