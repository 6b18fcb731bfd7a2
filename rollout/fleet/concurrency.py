"""Finds how many trajectories a replica should have at once (rollout.concurrency=auto).

Where episodes call tools, too many of them push each other's prefixes out of the KV cache, and each turn computes the
whole conversation again. With slow tools that is still the better choice, because the engine would idle otherwise, so
no look at the cache alone can decide it. The controller therefore tries: it lowers the number until what was computed
is still there, or raises it while there are free seats, and keeps what made more tokens per second.

Multiplicative steps on signs of congestion are those of TCP, and of CONCUR (arXiv 2601.22705) and prime-rl's
`orchestrator/concurrency.py`, which bring them to agents and KV caches. That a change has to prove itself is as in
`autoscaler.py`. `ConcurrencyController` judges by windows, and has neither clock nor fleet; `AdaptiveConcurrency`
measures the windows from what replicas report.
"""

import logging
from dataclasses import dataclass

from configs.rollout import Concurrency, RolloutConfig
from rollout.router import max_inflight

logger = logging.getLogger(__name__)
CROWDED = 0.2
"""The share of turns that the engine computes again from which on it may have too many trajectories."""
ROOMY = 0.9
"""The share of the KV cache in use up to which more trajectories may help, if no request waits for a seat."""
FIRST_STEP, LEAST_STEP, DOWN = 0.25, 0.0625, 0.75
"""The share by which the number rises at first and at least: each rise that does not pay halves it, because the best
number is just below the one where the cache overflows. The factor by which it falls."""
GAIN, LOSS = 0.03, 0.15
"""A change stays if it brings this many more tokens per second. One that lowers the number goes on until the cache
holds what was computed, unless it has lost this many by then."""
PATIENCE, MOST_PATIENCE, LATER = 1, 64, 4
"""The windows in a row that must ask for a change, at first and at most, and the factor by which every change that did
not pay raises them, once its step is the least: a fall that fails costs several windows."""
WINDOW_S = 30.0
"""The shortest window in seconds."""
MOST_PER_SEAT = 8
"""The most trajectories for each seat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The measurements of a while in which the replicas had as many trajectories as they may."""

    rate: float
    """Tokens per second of a replica."""
    again: float
    """Preemptions, and turns whose prefix was not in the KV cache any more, for each turn."""
    kv_usage: float = 0.0
    """The share of the KV cache that running requests need; 0 where the engine does not say."""
    waiting: float = 0.0
    """Requests of a replica that wait for a seat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A change that is not judged yet."""

    before: Window
    """The last window without it."""
    limit: int
    """The limit that it is to be better than."""
    way: int
    """1 for more trajectories, -1 for fewer."""


class ConcurrencyController:
    """Says how many trajectories a replica may have. A change is a trial: if it does not pay, it is taken back, and the
    next one of its kind waits longer.

    Example, where 30 episodes fit into the cache:
        72, half of the turns are computed again -> 54
        54, still half of them                   -> 40, and then 30
        30, hardly any, and 20% more tokens/s    -> 30
        30, and half of the seats are free       -> 37
        37, fewer tokens/s                       -> 30
        30                                       -> 33  # the next step is half as large
    """

    def __init__(self, limit: int, least: int, most: int):
        self.limit, self._least, self._most = limit, min(least, limit), max(most, limit)
        self._trial: Trial | None = None
        self._way = self._in_a_row = 0
        self._patience, self._step = {1: PATIENCE, -1: PATIENCE}, FIRST_STEP

    def decide(self, window: Window) -> int:
        """Return the number of trajectories that each replica may have from now on."""
        way = self._wanted_way(window)
        if self._trial is not None:
            return self._go_on(self._trial, window)
        self._in_a_row = self._in_a_row + 1 if way == self._way else 1
        self._way = way
        if way and self._in_a_row >= self._patience[way]:
            before = self.limit
            self._set(before * (1 + self._step if way > 0 else DOWN))
            self._in_a_row = 0
            if self.limit != before:
                self._trial = Trial(before=window, limit=before, way=way)
        return self.limit

    def _wanted_way(self, window: Window) -> int:
        """Return 1 for more trajectories, -1 for fewer, or 0. Where both may help, that which has failed less often."""
        may_rise = window.kv_usage < ROOMY and window.waiting < 1
        if window.again > CROWDED:
            return 1 if may_rise and self._patience[1] < self._patience[-1] else -1
        return 1 if may_rise else 0

    def _go_on(self, trial: Trial, window: Window) -> int:
        """Lower the limit further until the cache holds what was computed: half of the way shows nothing. Else end the
        trial: keep its limit, or take it back."""
        is_on_its_way = window.again > CROWDED and window.rate >= trial.before.rate * (1 - LOSS)
        if trial.way < 0 and is_on_its_way and self.limit > self._least:
            return self._set(self.limit * DOWN)
        self._trial, self._in_a_row = None, 0
        if window.rate >= trial.before.rate * (1 + min(GAIN, self._step / 4)):
            self._patience[trial.way] = PATIENCE
            if trial.way < 0:
                self._step = FIRST_STEP
            return self.limit
        if trial.way > 0 and self._step > LEAST_STEP:
            self._step = max(LEAST_STEP, self._step / 2)
        else:
            self._patience[trial.way] = min(MOST_PATIENCE, LATER * self._patience[trial.way])
        return self._set(trial.limit)

    def _set(self, limit: float) -> int:
        self.limit = min(self._most, max(self._least, int(limit)))
        return self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state of a replica at one moment. What is counted, is counted since its start."""

    time: float
    in_flight: int
    """Trajectories that have room on it."""
    assigned: int
    """Trajectories that it ever had."""
    tokens: int
    turns: int
    """Turns that have ended."""
    again: int
    """Preemptions, and turns whose prefix was not in the KV cache any more."""
    waiting: int = 0
    kv_usage: float | None = None
    is_paused: bool = False


@dataclass(slots=True)
class _Sums:
    """The measurements of a window until now, summed over all replicas."""

    seconds: float = 0.0
    tokens: int = 0
    turns: int = 0
    again: int = 0
    assigned: int = 0
    waiting_s: float = 0.0
    kv_s: float = 0.0

    def add(self, before: Look, look: Look) -> None:
        seconds = look.time - before.time
        self.seconds += seconds
        self.tokens += look.tokens - before.tokens
        self.turns += look.turns - before.turns
        self.again += look.again - before.again
        self.assigned += look.assigned - before.assigned
        self.waiting_s += seconds * look.waiting
        self.kv_s += seconds * (look.kv_usage or 0.0)

    def window(self) -> Window:
        return Window(
            rate=self.tokens / self.seconds,
            again=self.again / max(1, self.turns),
            kv_usage=self.kv_s / self.seconds,
            waiting=self.waiting_s / self.seconds,
        )


class AdaptiveConcurrency:
    """Measures windows of a fleet, and holds the limit that is the same for all its replicas. What a replica has beyond
    a lower limit stays there until it has ended.

    Example: router.max_inflight = concurrency.take("replica-0", look)  # every second, for every replica
    """

    def __init__(self, controller: ConcurrencyController, group_size: int, window_s: float = WINDOW_S):
        """`group_size`: the trajectories that come together. `window_s`: the shortest window in seconds."""
        self._controller, self._group_size, self._window_s = controller, group_size, window_s
        self._looks: dict[str, Look] = {}
        self._sums, self._is_settled = _Sums(), False

    @property
    def limit(self) -> int:
        return self._controller.limit

    def take(self, name: str, look: Look) -> int:
        """Take in a look at one replica. Returns the number of trajectories that each may have from now on."""
        before = self._looks.get(name)
        self._looks[name] = look
        if before is None or not self._is_at_limit(before) or not self._is_at_limit(look):
            return self.limit
        self._sums.add(before, look)
        if self._sums.seconds < self._window_s or self._sums.assigned < self._num_in_flight(look.time):
            return self.limit
        sums, limit = self._sums, self.limit
        self._sums = _Sums()
        if not self._is_settled:  # the trajectories that are new since the last rise were all young in it
            self._is_settled = True
        elif self._controller.decide(sums.window()) != limit:
            self._is_settled = self.limit < limit
            logger.info("rollout.concurrency=auto: %d trajectories per replica, after %d", self.limit, limit)
        return self.limit

    def _is_at_limit(self, look: Look) -> bool:
        """Return whether the replica has as many trajectories as it may. Others say nothing about the limit: too few
        prompts come, or more run there than a lower limit will leave."""
        return not look.is_paused and self.limit - self._group_size < look.in_flight <= self.limit

    def _num_in_flight(self, now: float) -> int:
        """Count the trajectories of the replicas that still report."""
        return sum(look.in_flight for look in self._looks.values() if look.time > now - self._window_s)


def make_concurrency(rollout: RolloutConfig, group_size: int) -> tuple[int, AdaptiveConcurrency | None]:
    """Return the number of trajectories that a replica has at most at first, and what changes it, if anything does."""
    seats = rollout.max_num_seqs * rollout.data_parallel_size
    limit = max_inflight(seats, group_size, rollout.episodes_per_seat)
    if rollout.concurrency is Concurrency.fixed:
        return limit, None
    controller = ConcurrencyController(
        limit, least=max_inflight(1, group_size, 1), most=max_inflight(seats, group_size, MOST_PER_SEAT)
    )
    return limit, AdaptiveConcurrency(controller, group_size)
