"""The driver's record of one replica: the states it goes through, and everything else that is known of it.

A fleet owns the records of its replicas (`rollout/fleet/fleet.py`). Router, checkpoint manager, health monitor,
operator and console read them, and ask the fleet to change them: nobody else keeps anything by a replica's name.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from configs.schema import PauseMode
from rollout.progress import ProgressReport
from rollout.request_ids import RequestId
from rollout.types import Completion, SamplingParams
from weight_sync.protocol import WeightTarget


class ReplicaState(Enum):
    STARTING = "STARTING"
    """Its process is being placed and its engine loads."""
    SYNCING = "SYNCING"
    """Its engine runs, on weights that are not verified."""
    READY = "READY"
    """It serves verified weights. The router chooses replicas in this state only."""
    DRAINING = "DRAINING"
    """It finishes its requests, and then ends."""
    STALE = "STALE"
    """It finishes its requests on complete weights that are not current. The next update may bring it back."""
    DEAD = "DEAD"
    """It has ended, for good. A replacement is another replica with a name of its own."""


FROM = {
    ReplicaState.STARTING: (),
    ReplicaState.SYNCING: (ReplicaState.STARTING, ReplicaState.STALE, ReplicaState.READY),
    ReplicaState.READY: (ReplicaState.SYNCING,),
    ReplicaState.STALE: (ReplicaState.SYNCING, ReplicaState.READY),
    ReplicaState.DRAINING: (ReplicaState.READY, ReplicaState.STALE),
    ReplicaState.DEAD: tuple(state for state in ReplicaState if state is not ReplicaState.DEAD),
}
"""State -> states from which a replica may enter it."""
CAN_SERVE = (ReplicaState.SYNCING, ReplicaState.READY, ReplicaState.STALE)
"""A replica in one of these states serves now, or after the next update."""
ENDED = "it has ended already"
CANNOT_DRAIN = {
    ReplicaState.STARTING: "it is still starting; remove it, or drain it once it is READY",
    ReplicaState.SYNCING: "it is still taking its weights; remove it, or drain it once it is READY",
    ReplicaState.DRAINING: "it is draining already",
    ReplicaState.DEAD: ENDED,
}
"""The reason why an operator cannot drain a replica in this state."""


class FleetRefusalError(RuntimeError):
    """A replica cannot change its state, or not without leaving too few. The message says what is allowed."""


class FleetMember(WeightTarget, Protocol):
    """The calls to a replica whose engine runs, in an actor (`ReplicaHandle`) or in this process (`RolloutReplica`)."""

    @property
    def node(self) -> str:
        """The node that runs it."""
        ...

    async def pause(self, mode: PauseMode, clear_cache: bool = False, timeout_s: float | None = None) -> None:
        """Pause within `timeout_s`, or stay as it was: see `RolloutReplica.pause`."""
        ...

    async def resume(self) -> float: ...

    async def abort(self, names: Collection[str] | None = None) -> list[str]: ...

    async def progress(self, known: Mapping[RequestId, int]) -> ProgressReport: ...

    async def stats(self) -> dict[str, float]: ...

    async def engine_metrics(self) -> str: ...

    async def sample(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> Completion: ...

    async def wait_dead(self) -> BaseException: ...

    def kill(self) -> None:
        """End its processes in any state. Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class Interval:
    """Time with requests between two reports, neither of them paused."""

    seconds: float
    tokens: int
    request_seconds: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, of the whole replica and of one of its requests."""

    total: float
    per_request: float


LEAST_S = 1.0
"""The seconds of generation from which on there is a speed to show."""


@dataclass(slots=True)
class Watch:
    """The observations of one replica by which `HealthMonitor` judges it."""

    observed: float
    """The time of the last observation."""
    report: ProgressReport | None = None
    silent_s: float = 0.0
    silence: str | None = None
    """The reason why weight updates go on without it: it has not answered for a while. None while it does."""
    stuck_s: float = 0.0
    intervals: deque[Interval] = field(default_factory=deque)
    speed: Speed | None = None
    """Its speed over the intervals; None in the first second. All others are compared with it every second, so that it
    is not computed again for each of them."""
    is_measured: bool = False
    """The intervals are long enough to judge by."""

    @property
    def running(self) -> int:
        """Requests that ran at the last report."""
        return 0 if self.report is None else self.report.running

    def measure(self, interval: Interval, window_s: float) -> None:
        """Add an interval, drop those that are older than the window, and take the speed."""
        self.intervals.append(interval)
        seconds = sum(interval.seconds for interval in self.intervals)
        while seconds - self.intervals[0].seconds >= window_s:
            seconds -= self.intervals.popleft().seconds
        self.is_measured = seconds >= window_s
        if seconds >= LEAST_S:
            tokens = sum(interval.tokens for interval in self.intervals)
            self.speed = Speed(tokens / seconds, tokens / sum(interval.request_seconds for interval in self.intervals))


@dataclass(eq=False, slots=True, kw_only=True)
class Replica:
    """One replica, from its name to its end.

    Example: STARTING -> SYNCING -> READY -> STALE -> SYNCING -> READY -> DEAD
    """

    name: str
    state: ReplicaState = ReplicaState.STARTING
    reason: BaseException | None = None
    """The cause why it is not in service, where somebody gave one."""
    handle: FleetMember | None = None
    """The calls to it; None before its engine runs."""
    is_addition: bool = False
    """True if it was added after the run had begun."""
    replaces_lost_at: float | None = None
    """The time at which the replica that it replaces was lost; None once that is made good."""
    successor: str | None = None
    """The replica that was asked for in its place, before it is lost. None, too, once that one was removed."""

    # -- weights: the checkpoint manager's view
    version: int = -1
    """The tag of the weights that were verified last; -1 before the first."""
    is_verified: bool = False
    """It is known to hold `version` now. False from the moment an update may begin to change its weights."""
    misses: int = 0
    """Updates in a row that could not reach it."""
    pinned: bool = False
    """An evaluation keeps it at its version: nothing is routed to it and updates leave it out."""
    expected: bool = False
    """An update under way may yet bring it into service, even if it has been ejected."""

    # -- load: the router's view
    in_flight: int = 0
    """Trajectories that have room on it."""
    assigned: int = 0
    """Trajectories that it ever had, which breaks ties so that idle replicas take turns."""
    visits: int = 0
    """Work that runs there without being routed."""

    # -- health and counters
    watch: Watch | None = None
    """The observations of the monitor while it watches the replica."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Its counters, as it gave them last."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from a question for its progress until the answer is stored."""
    starting: "asyncio.Task[None] | None" = None
    """The task that starts it, while it does."""
    ending: "asyncio.Task[bool] | None" = None
    """The task that ends it, once it has begun. Its result says whether the replica could report its progress."""

    @property
    def node(self) -> str | None:
        """The node that runs it; None before its engine runs."""
        return None if self.handle is None else self.handle.node

    @property
    def is_dead(self) -> bool:
        return self.state is ReplicaState.DEAD

    def enter(self, state: ReplicaState) -> None:
        """Change the state. Raise FleetRefusalError if `FROM` does not allow the change."""
        if self.state not in FROM[state]:
            allowed = " or ".join(allowed.value for allowed in FROM[state])
            raise FleetRefusalError(
                f"{self.name} is {self.state.value}: cannot be {state.value}, which only {allowed} can become"
            )
        self.state = state

    def enter_service(self, global_steps: int) -> None:
        """Enter READY: every worker of the replica holds exactly the weights that were published with this tag."""
        if self.state is not ReplicaState.SYNCING:
            self.enter(ReplicaState.SYNCING)
        self.enter(ReplicaState.READY)
        self.mark_verified(global_steps)
        self.reason = None

    def mark_verified(self, global_steps: int) -> None:
        self.version, self.is_verified, self.misses = global_steps, True, 0

    def leave_service(self, error: BaseException) -> bool:
        """Enter STALE, if it serves or is about to. Returns whether it did."""
        if self.state not in (ReplicaState.SYNCING, ReplicaState.READY):
            return False
        self.enter(ReplicaState.STALE)
        self.reason = error
        return True
