"""Counts how much an engine had to do, and did. A speed is tokens per second in which the engine had requests."""

import asyncio


class Usage:
    def __init__(self) -> None:
        self.running = 0
        """Requests that run or wait now."""
        self.tokens = 0
        """Tokens sampled since the start; for a request that was cancelled, as many as were known. Never falls."""
        self.first_tokens: dict[str, float | None] = {}
        """The time when the first token of a request came, on the event loop's clock, by the names that somebody put
        here. None: it has not come."""
        self._busy_s = self._request_s = self._counted = 0.0

    def change(self, by: int) -> None:
        self._count()
        self.running += by

    def began(self, name: str) -> None:
        """Note the first token of a request. It counts where somebody asks for it, and once."""
        if name in self.first_tokens and self.first_tokens[name] is None:
            self.first_tokens[name] = asyncio.get_running_loop().time()

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request since the start."""
        self._count()
        return self._busy_s

    @property
    def request_s(self) -> float:
        """Seconds of all requests since the start, summed."""
        self._count()
        return self._request_s

    def _count(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.running:
            self._busy_s += now - self._counted
            self._request_s += self.running * (now - self._counted)
        self._counted = now
