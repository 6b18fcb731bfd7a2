"""For how long replicas have been paused: deadlines of what they generate do not count it."""

import asyncio


class PausedTime:
    """By what the replicas say of themselves, again and again."""

    def __init__(self) -> None:
        self._paused: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._any_s = 0.0
        self._counted = 0.0

    def told(self, name: str, paused: bool) -> None:
        self._count()
        if paused:
            self._paused.add(name)
        else:
            self._paused.discard(name)

    def of(self, name: str) -> float:
        """Seconds since ever."""
        self._count()
        return self._seconds.get(name, 0.0)

    def of_any(self) -> float:
        """Seconds since ever in which some replica was paused."""
        self._count()
        return self._any_s

    def _count(self) -> None:
        now = asyncio.get_running_loop().time()
        elapsed, self._counted = now - self._counted, now
        if self._paused:
            self._any_s += elapsed
        for name in self._paused:
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed
