"""Holds searches back while their server is down."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rollout.search.documents import RetrievalError

logger = logging.getLogger(__name__)
FIRST_PROBE_S, MAX_PROBE_S = 1.0, 30.0
"""Between two probes: twice as long each time."""
REMIND_S = 60.0
"""Between two warnings about the same."""


class Outages:
    """Counts the failures of a server. After `max_failures` in a row it is down, until a probe succeeds. One that has
    never answered is down at its first failure: its name may be wrong."""

    def __init__(self, name: str, probe: Callable[[], Awaitable[str | None]], *, max_failures: int, timeout_s: float):
        """`probe`: asks the server, and returns what is wrong, or None. `timeout_s`: how long one waits for the end of
        an outage, counted from its begin."""
        self._name, self._probe = name, probe
        self._max_failures, self._timeout_s = max_failures, timeout_s
        self._has_answered = False
        self._failures = self._unreported = 0
        self._since = self._reported_at = float("-inf")
        self._last_error = ""
        self._up: asyncio.Event | None = None
        self._probing: asyncio.Task[None] | None = None
        self.num_waiting = 0

    @property
    def is_down(self) -> bool:
        return self._up is not None

    def note(self, error: str | None) -> None:
        """What came of a call; None is success."""
        if error is None:
            self._failures, self._has_answered = 0, True
            return
        self._failures += 1
        self._unreported += 1
        self._last_error = error
        now = asyncio.get_running_loop().time()
        if self.is_down:
            return
        if self._failures >= (self._max_failures if self._has_answered else 1):
            self._begin(now)
        elif now >= self._reported_at + REMIND_S:
            logger.warning("%s: %d searches failed, the last with: %s", self._name, self._unreported, error)
            self._reported_at, self._unreported = now, 0

    async def over(self) -> None:
        """Returns at once while the server is up, else when it is up again. Raises RetrievalError where the outage has
        lasted for `timeout_s` seconds."""
        if self._up is None:
            return
        self.num_waiting += 1
        try:
            async with asyncio.timeout_at(self._since + self._timeout_s):
                await self._up.wait()
        except TimeoutError:
            for_s = f"for more than down_timeout_s={self._timeout_s:g}"
            raise RetrievalError(f"{self._name} is down {for_s}: {self._last_error}") from None
        finally:
            self.num_waiting -= 1

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    def _begin(self, now: float) -> None:
        self._since, self._up = now, asyncio.Event()
        text = "%s is down after %d failures in a row, the last with: %s. Searches wait for it, for up to %g s"
        logger.warning(text, self._name, self._failures, self._last_error, self._timeout_s)
        self._probing = asyncio.get_running_loop().create_task(self._probe_until_up())

    async def _probe_until_up(self) -> None:
        delay_s, reminded_at, clock = FIRST_PROBE_S, self._since, asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(delay_s)
            error = await self._probe()
            if error is None:
                break
            self._last_error = error
            delay_s = min(MAX_PROBE_S, 2 * delay_s)
            if clock() >= reminded_at + REMIND_S:
                reminded_at, down_s = clock(), clock() - self._since
                text = "%s is still down, for %.0f s now: %s. %d calls wait for it"
                logger.warning(text, self._name, down_s, error, self.num_waiting)
        logger.warning("%s is back after %.0f s; %d calls waited", self._name, clock() - self._since, self.num_waiting)
        self._failures, self._unreported, self._has_answered = 0, 0, True
        up, self._up = self._up, None
        assert up is not None
        up.set()
