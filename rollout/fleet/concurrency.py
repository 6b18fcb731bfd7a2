"""Decides how many episodes a replica has at most (rollout.concurrency=auto), from what the replicas report.

There are two candidates, and averages say what each comes to, so that no number is searched for:

- Fill every seat: with as many episodes that none is empty, though some wait for their tools (Little's law).
- Keep the cache: with as many episodes as have room in the KV cache. With more, those that come back from their tools
  find that others have pushed their conversation out, and all of it is computed again.

Which of the two samples more tokens depends on the tools: slow ones leave an engine idle that keeps its cache. Answers
of one turn have nothing to lose between turns. So the second candidate counts only where turns are computed again.
"""

import logging
from dataclasses import dataclass

from configs.rollout import Concurrency, RolloutConfig
from rollout.router import max_inflight

logger = logging.getLogger(__name__)
CROWDED, BUSY, CALM = 0.2, 0.1, 0.02
"""The share of turns computed again from which on the cache has too many episodes; from which on it is tried whether
fewer are better; and below which it may take more."""
DOWN, A_LITTLE_DOWN = 0.9, 0.98
"""The factors by which the estimate of what the cache holds falls where it is crowded, and where it is a little."""
UP, RETURN, RECOVERY = 1.1, 1.03, 1.003
"""The factors by which it rises: where it was never too high, where more tokens per second came before, and elsewhere,
since it may have been too high by chance."""
FULL = 0.95
"""The share of seats that are taken from which on more episodes would only wait."""
SLOW, FADING = 0.95, 0.99
"""The share of the best tokens per second under which a window is slow, and what is left of the best after each."""
GAIN = 1.05
"""The advantage in tokens per second that the other candidate must promise."""
TRIAL = 4
"""The windows that a candidate has before the two are compared: one window may be slow by chance, and the number that
the cache holds is found in several."""
MEMORY = 100
"""The windows after which the speed of the other candidate is forgotten, so that it is tried again."""
WINDOW_S = 30.0
"""The shortest window in seconds."""
CHECK_S = 1.0
"""The seconds after which it is looked again whether a window is over: that takes all replicas."""
MOST_PER_SEAT = 8
"""The most episodes for each seat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Means over a while, for one replica."""

    rate: float
    """Tokens per second."""
    again: float
    """The share of turns whose conversation was not in the KV cache any more."""
    in_flight: float
    """Episodes that have room on it."""
    inside: float
    """Requests inside the engine."""
    waiting: float
    """Requests that wait for a seat."""
    kv_usage: float
    """The share of the KV cache that the requests inside need; 0 where the engine does not say."""

    @property
    def fits(self) -> float:
        """The episodes for which the cache has room, if all are as large as those inside."""
        return self.inside / self.kv_usage if self.kv_usage > 0 else float("inf")

    @property
    def per_seat(self) -> float:
        """The episodes that keep one seat busy: those in it and at their tools, for each that is in it."""
        return max(0.0, self.in_flight - self.waiting) / self.inside

    @property
    def at_tools(self) -> float:
        """Episodes that ask for nothing now."""
        return max(0.0, self.in_flight - self.inside - self.waiting)


class ConcurrencyController:
    """Says how many episodes a replica may have. It has neither clock nor fleet.

    Example, with 64 seats and a cache that holds 30 episodes:
        136, half of the turns computed again, 20 at tools   -> 34   # half a group is added
        34, none of them, 40% more tokens/s                  -> 37   # it may hold more
        37, tools have become slow, half of the tokens/s     -> 37   # one window may be slow by chance
        37, the same in the fourth window, most seats empty  -> 314  # fill every seat
    """

    def __init__(self, seats: int, first: int, most: int, group_size: int):
        """`first`: the limit at first, which is not undercut to fill seats. `most`: the highest one."""
        self.limit = self._first = first
        self._seats, self._most, self._group_size = seats, most, group_size
        self._keeps_cache, self._tried = False, TRIAL
        self._rates = dict[bool, tuple[int, float]]()
        """The number of the last window in which it kept the cache, or did not, and the tokens per second until then,
        of which the latest count most."""
        self._number = 0
        self._fits = self._enough = 0.0
        self._correction, self._most_correction = 1.0, float("inf")
        self._best = 0.0

    def decide(self, window: Window) -> int:
        """Return the number of episodes that each replica may have from now on."""
        if window.inside <= 0:
            return self.limit
        rate = self._take(window)
        if self._keeps_cache:
            self._correct(window)
        self._tried += 1
        if self._tried > TRIAL and self._promise(window) > GAIN * rate:
            self._keeps_cache, self._tried = not self._keeps_cache, 0
        fill = self._to_fill_seats(window)
        self.limit = min(fill, self._to_keep_cache()) if self._keeps_cache else fill
        return self.limit

    def _take(self, window: Window) -> float:
        """Bring the averages up to date. Returns the tokens per second of what it does now. Where the cache is kept and
        prompts or slots are missing, a window says nothing about them."""
        self._number += 1
        _, rate = self._rates.get(self._keeps_cache, (0, window.rate))
        if not self._keeps_cache or self._is_reached(window):
            rate = (rate + window.rate) / 2
            self._rates[self._keeps_cache] = self._number, rate
        fits = min(window.fits, 2.0 * self._most)
        self._fits = (self._fits + fits) / 2 if self._fits else fits
        enough = self._seats * window.per_seat + self._group_size / 2
        if window.again < CALM or not self._enough:  # turns that are computed again stay longer in their seats
            self._enough = (self._enough + enough) / 2 if self._enough else enough
        return rate

    def _is_reached(self, window: Window) -> bool:
        return window.in_flight > self.limit - self._group_size

    def _to_fill_seats(self, window: Window) -> int:
        """Return as many episodes for each seat as keep it busy. While none is empty, or the limit is not reached, no
        more are needed."""
        if window.inside < FULL * self._seats and self._is_reached(window):
            return max(self._first, int(min(self._most, self._first * window.per_seat)))
        return max(self._first, self.limit)

    def _to_keep_cache(self) -> int:
        """Return what has room, but not more than keep every seat busy: others would only wait for one. Half a group is
        added: a group comes when there is room for all of it, so that the number of episodes lies between the limit and
        a group less."""
        most = min(self._enough, float(self._most))
        return max(2 * self._group_size, int(min(self._fits * self._correction, most) + self._group_size / 2))

    def _promise(self, window: Window) -> float:
        """Return the tokens per second of the other candidate: what it had, or the most that it can have. With fewer
        episodes than now are at tools, the engine would soon be idle."""
        if self._keeps_cache:
            if not self._is_reached(window):
                return 0.0
            bound = window.rate * self._seats / window.inside
        elif window.again > BUSY:
            bound = window.rate * self._fits * self._correction / max(1.0, window.at_tools)
        else:
            return 0.0
        number, rate = self._rates.get(not self._keeps_cache, (0, bound))
        return bound if self._number - number > MEMORY else min(bound, rate)

    def _correct(self, window: Window) -> None:
        """Correct the estimate of what the cache holds: prefixes that episodes share are counted for each of them."""
        self._best = max(window.rate, FADING * self._best)
        is_slow = window.rate < SLOW * self._best
        if window.again > BUSY or (window.again >= CALM and is_slow):
            if self._to_keep_cache() > 2 * self._group_size:
                self._correction *= DOWN if window.again > CROWDED else A_LITTLE_DOWN
            self._most_correction = self._correction
        elif window.again < CALM and self._is_reached(window) and self._fits * self._correction < self._enough:
            self._most_correction *= RETURN if is_slow and window.again < CALM / 4 else RECOVERY
            self._correction = min(self._most_correction, UP * self._correction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state of a replica at one moment. Tokens, turns and the like are counted since its start."""

    time: float
    in_flight: int
    assigned: int
    """Episodes that it ever had."""
    tokens: int
    turns: int
    """Turns that have ended."""
    again: int
    """Turns of them whose conversation was not in the KV cache any more."""
    inside: int
    waiting: int
    kv_usage: float | None = None
    is_steady: bool = True
    """It is in service, not paused, and no evaluation is on it."""


class AdaptiveConcurrency:
    """Measures windows over all replicas, and holds the limit that they share. Nothing that runs is stopped: what a
    replica has beyond a lower limit stays there until it has ended.

    Example: router.limit(concurrency.take("replica-0", look))  # with every report of a replica
    """

    def __init__(self, controller: ConcurrencyController, window_s: float = WINDOW_S):
        """`window_s`: the shortest window in seconds."""
        self._controller, self._window_s = controller, window_s
        self._looks = dict[str, Look]()
        self._is_settled = False
        self._began = self._checked = float("-inf")
        self._begin()

    @property
    def limit(self) -> int:
        return self._controller.limit

    def take(self, name: str, look: Look) -> int:
        """Take in a look at one replica. Returns the number of episodes that each may have from now on."""
        before = self._looks.get(name)
        self._looks[name] = look
        if before is None or not before.is_steady or not look.is_steady:
            return self.limit
        if not 0 < look.in_flight <= self.limit or not before.in_flight:  # idle, or with a surplus of a higher limit
            return self.limit
        if not self._seconds:
            self._began = self._checked = before.time
        self._add(before, look)
        if look.time >= self._began + self._window_s and look.time >= self._checked + CHECK_S:
            self._checked = look.time
            if self._assigned >= self._num_in_flight():
                self._end()
        return self.limit

    def _end(self) -> None:
        limit, is_settled = self.limit, self._is_settled
        if is_settled:
            self._controller.decide(self._window())
        if abs(self.limit - limit) > 0.1 * limit:
            logger.info("rollout.concurrency=auto: %d episodes per replica, after %d", self.limit, limit)
        # In the first window after a rise, the new episodes are all young; after a fall, others have lost their cache.
        self._is_settled = not is_settled or 0.9 * limit <= self.limit <= limit
        self._begin()

    def _begin(self) -> None:
        self._seconds = self._in_flight_s = self._inside_s = self._waiting_s = self._kv_s = 0.0
        self._tokens = self._turns = self._again = self._assigned = 0

    def _add(self, before: Look, look: Look) -> None:
        seconds = look.time - before.time
        self._seconds += seconds
        self._in_flight_s += seconds * look.in_flight
        self._inside_s += seconds * look.inside
        self._waiting_s += seconds * look.waiting
        self._kv_s += seconds * (look.kv_usage or 0.0)
        self._tokens += look.tokens - before.tokens
        self._turns += look.turns - before.turns
        self._again += look.again - before.again
        self._assigned += look.assigned - before.assigned

    def _window(self) -> Window:
        return Window(
            rate=self._tokens / self._seconds,
            again=self._again / max(1, self._turns),
            in_flight=self._in_flight_s / self._seconds,
            inside=self._inside_s / self._seconds,
            waiting=self._waiting_s / self._seconds,
            kv_usage=self._kv_s / self._seconds,
        )

    def _num_in_flight(self) -> int:
        """Count the episodes of the replicas that have reported in this window."""
        return sum(look.in_flight for look in self._looks.values() if look.time >= self._began)


def make_controller(rollout: RolloutConfig, group_size: int) -> ConcurrencyController:
    """Return the controller of a run. It begins at the number that rollout.concurrency=fixed keeps."""
    seats = rollout.max_num_seqs * rollout.data_parallel_size
    first = max_inflight(seats, group_size, rollout.episodes_per_seat)
    most = max(first, max_inflight(seats, group_size, MOST_PER_SEAT))
    return ConcurrencyController(seats, first, most, group_size)


def make_concurrency(rollout: RolloutConfig, group_size: int) -> tuple[int, AdaptiveConcurrency | None]:
    """Return the number of episodes that a replica has at most at first, and what changes it, if anything does."""
    controller = make_controller(rollout, group_size)
    is_fixed = rollout.concurrency is Concurrency.fixed
    return controller.limit, None if is_fixed else AdaptiveConcurrency(controller)
