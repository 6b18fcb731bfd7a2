"""Put the events of all processes on one clock, the driver's.

The driver's clock is its machine's wall clock, read once, plus the seconds of its monotonic clock since: it never
jumps. Every other process stamps its events with its own monotonic clock. The driver measures how far that is from its
own whenever it takes events: it asks at time a, the answer carries the process's clock m, and comes at time b. The
process read m somewhere between a and b, so that `(a + b) / 2 - m` is the offset, wrong by half the round trip at most.
The measurement with the shortest round trip counts. As two clocks drift apart, it is worth less from second to second,
and a newer one takes its place.
"""

import time
from dataclasses import dataclass

DRIFT = 1e-4
"""The seconds per second by which two monotonic clocks may drift apart: twice what crystals in servers do."""


class DriverClock:
    """A monotonic clock that shows seconds since the epoch."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset


@dataclass(frozen=True, slots=True)
class Offset:
    """The driver's clock minus that of a process."""

    seconds: float
    error_s: float
    """The largest error when it was measured."""
    measured: float
    """The time of the measurement, on the driver's clock."""

    def error_at(self, now: float) -> float:
        return self.error_s + DRIFT * (now - self.measured)


class RemoteClock:
    """The clock of another process, as the driver knows it.

    Example:
        clock = RemoteClock()
        clock.measure(sent_at=100.0, remote=7.0, answered=100.2)  # offset 93.1, wrong by 0.1 at most
        clock.to_driver(6.5)  # 99.6
    """

    def __init__(self) -> None:
        self.offset: Offset | None = None

    def measure(self, *, sent_at: float, remote: float, answered: float) -> bool:
        """Measure the offset of the process, and return whether this measurement counts from now on.

        `sent_at` and `answered` are on the driver's clock, `remote` on that of the process.
        """
        offset = Offset((sent_at + answered) / 2 - remote, (answered - sent_at) / 2, answered)
        if self.offset is not None and self.offset.error_at(answered) <= offset.error_s:
            return False
        self.offset = offset
        return True

    def to_driver(self, remote: float) -> float:
        assert self.offset is not None, "measure comes first"
        return remote + self.offset.seconds
