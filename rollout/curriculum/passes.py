"""The pass rate of each row: how often responses to it pass, with less weight for what was seen long ago."""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.curriculum.order import EvidenceState
from rollout.types import IntArray

Rates = NDArray[np.float64]
PRIOR = 0.5
"""The passes, and the failures, that a row counts before it was seen: Jeffreys' prior of a rate, Beta(1/2, 1/2)."""


class Evidence:
    """Counts of passes and failures, one pair for each of `size` entries, that halve in `half_life` ticks of a clock.

    They are brought up to date only where they are read or written, so that a tick costs nothing.

    Example:
        evidence = Evidence(2, half_life=10)
        evidence.add(1, 6, 2, now=0)
        evidence.at(np.array([1]), now=10)   # ([3.0], [1.0])
    """

    def __init__(self, size: int, half_life: float):
        self._half_life = half_life
        self._passed = np.zeros(size, np.float32)
        self._failed = np.zeros(size, np.float32)
        self._since = np.zeros(size, np.int32)
        """The time at which the counts of an entry were as they are here."""

    def add(self, entry: int, passed: int, failed: int, now: int) -> None:
        weight = 0.5 ** ((now - int(self._since[entry])) / self._half_life)
        self._passed[entry] = self._passed[entry] * weight + passed
        self._failed[entry] = self._failed[entry] * weight + failed
        self._since[entry] = now

    def at(self, entries: IntArray, now: int) -> tuple[Rates, Rates]:
        """Return the passes and the failures of these entries, as they count now."""
        weights = 0.5 ** ((now - self._since[entries]) / self._half_life)
        return self._passed[entries] * weights, self._failed[entries] * weights

    def state(self) -> EvidenceState:
        return EvidenceState(passed=self._passed.copy(), failed=self._failed.copy(), since=self._since.copy())

    def restore(self, state: EvidenceState) -> None:
        self._passed, self._failed, self._since = state.passed.copy(), state.failed.copy(), state.since.copy()


class PassRates:
    """The knowledge of the rows of an order: visits, and the posterior of each row's pass rate.

    The posterior of a row is Beta(a + passes, b + failures). Its prior is Beta(1/2, 1/2) or, where the rows are in
    pools, Beta(m, 1 - m) with the pass rate m of the row's pool: rows of one difficulty tell of one another, also of
    those that were never drawn. What was seen `half_life` outcomes ago counts half, so a row that is not drawn for long
    returns to its prior.

    Example:
        passes = PassRates(3, half_life=1000)
        passes.visit(2)
        passes.tell(2, passed=8, failed=0)
        passes.rate()       # [0.5, 0.5, 0.944]
        passes.variance()   # [0.25, 0.25, 0.052]
    """

    def __init__(self, num_rows: int, half_life: float, pools: Sequence[int] | None = None):
        """`pools`: the pool of each row, from 0. None: rows tell nothing of one another."""
        self.visits: IntArray = np.zeros(num_rows, np.int32)
        """The number of times that each row was drawn."""
        self.clock = 0
        """Outcomes that were told."""
        self._all: IntArray = np.arange(num_rows, dtype=np.int32)
        self._pools: IntArray | None = None if pools is None else np.array(pools, np.int32)
        self._of_rows = Evidence(num_rows, half_life)
        self._of_pools = Evidence(0 if pools is None else max(pools) + 1, half_life)

    def visit(self, row: int) -> None:
        self.visits[row] += 1

    def tell(self, row: int, passed: int, failed: int) -> None:
        """Take note of a group of the row."""
        self.clock += 1
        self._of_rows.add(row, passed, failed, self.clock)
        if self._pools is not None:
            self._of_pools.add(int(self._pools[row]), passed, failed, self.clock)

    def rate(self, rows: IntArray | None = None) -> Rates:
        """Return the mean of the posterior of these rows' pass rates, by default of all: the probability that the next
        response passes."""
        rows = self._all if rows is None else rows
        prior = np.full(len(rows), PRIOR)
        if self._pools is not None:
            passed, failed = self._of_pools.at(self._pools[rows], self.clock)
            prior = (PRIOR + passed) / (2 * PRIOR + passed + failed)
        passed, failed = self._of_rows.at(rows, self.clock)
        return (prior + passed) / (1 + passed + failed)

    def variance(self, rows: IntArray | None = None) -> Rates:
        """Return the variance of the next response's reward, 1 or 0, at these rows, at most 1/4.

        It is the expected variance within the row's group plus the variance of the pass rate itself, of which little is
        known. So a row that was never drawn has the largest there is.
        """
        rate = self.rate(rows)
        return rate * (1 - rate)

    @property
    def checksum(self) -> int:
        """Return a number for the pools of the rows: 0 where there are none."""
        return 0 if self._pools is None else zlib.crc32(self._pools.astype("<i4").tobytes())

    def evidence(self) -> tuple[EvidenceState, EvidenceState]:
        """Return the states of what was seen of rows, and of pools."""
        return self._of_rows.state(), self._of_pools.state()

    def restore(self, clock: int, visits: IntArray, of_rows: EvidenceState, of_pools: EvidenceState) -> None:
        self.clock, self.visits = clock, visits.copy()
        self._of_rows.restore(of_rows)
        self._of_pools.restore(of_pools)


class PassRatesView:
    """The pass rates of an order as a user's function reads them. Nothing here changes the order.

    Example: passes.visits, passes.rate(), passes.variance(np.array([2]))
    """

    def __init__(self, passes: PassRates):
        self._passes = passes

    @property
    def visits(self) -> IntArray:
        """The number of times that each row was drawn, to be read only."""
        visits = self._passes.visits.view()
        visits.flags.writeable = False
        return visits

    @property
    def clock(self) -> int:
        """Outcomes that were told."""
        return self._passes.clock

    def rate(self, rows: IntArray | None = None) -> Rates:
        """Return the mean of the posterior of these rows' pass rates, by default of all."""
        return self._passes.rate(rows)

    def variance(self, rows: IntArray | None = None) -> Rates:
        """Return the variance of the next response's reward at these rows, by default at all."""
        return self._passes.variance(rows)
