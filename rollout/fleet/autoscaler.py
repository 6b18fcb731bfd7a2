"""Decides how many replicas a run needs while it trains, and adds or drains them (rollout.autoscale.max_replicas).

`Autoscaler` judges by windows of what was measured, and has neither clock nor fleet. `Autoscaling` measures the windows
and lets the operator act, in the same way as `slipstream fleet add` and `drain`.
"""

import asyncio
import logging
import math
from dataclasses import dataclass

from rollout.buffer import TrajectoryBuffer
from rollout.events.kinds import FleetEvent, FleetEventKind
from rollout.fleet.fleet import now
from rollout.fleet.operator import FleetOperator
from rollout.replica.lifecycle import FleetRefusalError, ReplicaState

logger = logging.getLogger(__name__)
WAITS, IDLE = 0.10, 0.02
"""The share of the time that the trainer waits for a batch: above the first more replicas may help, below the second
fewer may do. Between them nothing changes."""
GAIN, LOSS = 0.05, 0.03
"""A larger fleet stays if the trainer works this much more of the time, and a smaller one if not this much less. Tokens
per second would say it less well: lengths change while the trainer learns."""
PATIENCE, MOST_PATIENCE = 2, 64
"""The windows in a row that must ask for a change, at first and at most: every change that did not pay doubles them."""
LATE = 20
"""The windows after which replicas that have not come are given up: ten minutes at least, in which one can start."""
WINDOW_S = 30.0
"""The shortest window in seconds."""
LOOK_S = 1.0
"""The seconds between two looks at the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The measurements of a while in which the same replicas served."""

    replicas: int
    wait: float
    """The share of the time that the trainer waited for a batch."""
    has_surplus: bool
    """A whole batch was ready at its end."""
    coming: int = 0
    """Replicas that were asked for and have no place yet, or start."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """A change that is not judged yet."""

    before: Window
    """The last window without it."""
    replicas: int
    """The number that was asked for."""
    late: int = 0
    """The windows that it has waited for some of them."""


class Autoscaler:
    """Says how many replicas to run. A change is a trial: if it did not pay, it is taken back, and the next one of its
    kind waits longer. So a run whose trainer waits for the slowest trajectory, and not for more of them, does not grow.

    Example, from 1 to 8 replicas:
        2 replicas, the trainer waits 40%: twice -> 2, then 4  # 2 / (1 - 0.4)
        4 replicas, it never waits: twice        -> 4, then 3
        3 replicas, it waits 10%                 -> 4          # and it takes four times until the next try
    """

    def __init__(self, least: int, most: int):
        self._least, self._most = least, most
        self._trial: Trial | None = None
        self._way = self._in_a_row = 0
        self._patience = {1: PATIENCE, -1: PATIENCE}

    def decide(self, window: Window) -> int:
        """Return the number of replicas to run from now on, those that are on their way included."""
        way = self._wanted_way(window)
        self._in_a_row = self._in_a_row + 1 if way == self._way else 1
        self._way = way
        if self._trial is not None and self._trial.replicas != window.replicas + window.coming:
            self._trial = None  # a person, or a loss, made it another number, which says nothing of what was asked for
        if window.coming:  # the trial is judged when they serve, unless nobody needs them any more, or they do not come
            is_over = self._is_due(-1) or self._is_late()
            return self._give_up(window) if is_over else self._within(window.replicas + window.coming)
        trial, self._trial = self._trial, None
        if trial is not None and trial.before.replicas != window.replicas and not self._has_paid(trial.before, window):
            self._in_a_row = 0
            return self._within(trial.before.replicas)
        wanted = window.replicas
        if way and self._is_due(way):
            self._in_a_row = 0
            wanted = math.ceil(wanted / max(0.5, 1 - window.wait)) if way > 0 else wanted - 1  # at most twice as many
            self._trial = Trial(before=window, replicas=self._within(wanted))
        return self._within(wanted)

    @staticmethod
    def _wanted_way(window: Window) -> int:
        if window.wait > WAITS:
            return 1
        return -1 if window.wait < IDLE and window.has_surplus else 0

    def _is_due(self, way: int) -> bool:
        return self._way == way and self._in_a_row >= self._patience[way]

    def _is_late(self) -> bool:
        """Return whether the trial has waited for long enough. The next one then waits longer. A replacement of a lost
        replica is waited for without an end."""
        if self._trial is None or self._trial.replicas <= self._trial.before.replicas:
            return False
        self._trial.late += 1
        if self._trial.late < LATE:
            return False
        self._put_off(1)
        return True

    def _give_up(self, window: Window) -> int:
        """Ask for no more than have come, by which the trial is judged."""
        wanted = self._within(window.replicas)
        if self._trial is not None:
            self._trial.replicas = wanted
        return wanted

    def _has_paid(self, before: Window, window: Window) -> bool:
        """Return whether the change since `before` was worth it. The next of its kind waits longer if it was not."""
        way = 1 if window.replicas > before.replicas else -1
        has_paid = 1 - window.wait >= (1 - before.wait) * (1 + GAIN if way > 0 else 1 - LOSS)
        if has_paid:
            self._patience[way] = PATIENCE
        else:
            self._put_off(way)
        return has_paid

    def _put_off(self, way: int) -> None:
        self._patience[way] = min(MOST_PATIENCE, 2 * self._patience[way])

    def _within(self, replicas: int) -> int:
        return min(self._most, max(self._least, replicas))


@dataclass(kw_only=True)
class Autoscaling:
    """Measures a run window by window, and changes the number of its replicas.

    Example: two windows in which the trainer waits 40% of the time for 3 replicas -> operator.add(2)
    """

    operator: FleetOperator
    buffer: TrajectoryBuffer
    scaler: Autoscaler

    async def run(self) -> None:
        """Measure and act until cancelled, or until a loss is not replaced: to add a replica would replace it."""
        while True:
            window = await self._measure()
            if self.operator.fleet.is_out_of_replacements:
                limit = f"rollout.max_replacements={self.operator.fleet.max_replacements}"
                text = f"a loss is not replaced ({limit}), and so the number of replicas follows the load no more"
                return self._tell(FleetEventKind.GIVEN_UP, f"{text} (rollout.autoscale.max_replicas)")
            wanted = self.scaler.decide(window)
            if wanted != window.replicas + window.coming:
                await self._change(window, wanted)
                await self._measure()  # groups that began before the change are in it

    async def _measure(self) -> Window:
        """Return a window in which the same replicas served all the time, and every slot was freed once. What happens
        while the fleet is unsettled, by an evaluation, say, is not part of it."""
        buffer, window = self.buffer, self.buffer.ledger.window
        names, seconds, waited_s, groups = list[str](), 0.0, 0.0, 0
        while seconds < WINDOW_S or groups < window.capacity:
            serving, began, waited_before, groups_before = self._serving(), now(), buffer.waited_s(), buffer.num_trained
            await asyncio.sleep(LOOK_S)
            if not serving or self._serving() != serving:
                continue
            if serving != names:
                names, seconds, waited_s, groups = serving, 0.0, 0.0, 0
            seconds += now() - began
            waited_s += buffer.waited_s() - waited_before
            groups += buffer.num_trained - groups_before
        return Window(
            replicas=len(names),
            wait=waited_s / seconds,
            has_surplus=buffer.ledger.num_ready >= window.groups_per_step,
            coming=len(self._coming()),
        )

    def _in(self, *states: ReplicaState) -> list[str]:
        return [name for name, replica in self.operator.fleet.replicas.items() if replica.state in states]

    def _coming(self) -> list[str]:
        """Return the replicas that start, but none in the place of another that is still there: that is no more."""
        successors = {replica.successor for replica in self.operator.fleet.replicas.values() if not replica.is_dead}
        return [name for name in self._in(ReplicaState.STARTING) if name not in successors]

    def _serving(self) -> list[str]:
        """Return the replicas in service; none while some come or go, evaluate, or are paused by a client."""
        unsettled = self._in(ReplicaState.SYNCING, ReplicaState.STALE, ReplicaState.DRAINING)
        return [] if unsettled or self.operator.control.paused is not None else self._in(ReplicaState.READY)

    async def _change(self, window: Window, wanted: int) -> None:
        """Add replicas, or take the newest away: first those that do not serve yet."""
        why = f"the trainer waits {window.wait:.0%} of the time for {window.replicas} (rollout.autoscale.max_replicas)"
        more = wanted - window.replicas - window.coming
        if more > 0:
            names = self.operator.add(more)
            return self._tell(FleetEventKind.STARTING, f"{', '.join(names)} to be added: {why}")
        starting, serving = self._coming(), self._in(ReplicaState.READY)
        for name in (starting[::-1] + serving[::-1])[:-more]:
            try:
                await (self.operator.remove(name) if name in starting else self.operator.drain(name))
            except FleetRefusalError as refusal:  # one was lost in this moment
                logger.info("%s stays: %s", name, refusal)
                return
            self._tell(FleetEventKind.DRAINING, f"{name} to go: {why}")

    def _tell(self, kind: FleetEventKind, text: str) -> None:
        self.operator.fleet.report(FleetEvent(kind, None, text))
