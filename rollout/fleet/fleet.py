"""The replicas of a run: which belong to the fleet, in which state each is, and what replaces a lost one."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs.runtime.deadline import within
from rollout.errors import TooFewReplicasError
from rollout.events.driver import NO_EVENTS, DriverEvents
from rollout.events.kinds import FleetEvent, FleetEventKind, Report
from rollout.fleet.lifecycle import CANNOT_DRAIN, FleetRefusalError, Lifecycle, ReplicaState
from rollout.fleet.member import FleetMember
from rollout.progress import Progress, ProgressReport
from rollout.request_ids import RequestId
from rollout.router import ReplicaRouter

logger = logging.getLogger(__name__)
CAN_SERVE = (ReplicaState.SYNCING, ReplicaState.READY, ReplicaState.STALE)
"""A replica in one of these states serves now, or after the next update."""


class NoProgressError(RuntimeError):
    """A replica could not report its progress. The message names it, the cause says why."""


@dataclass(frozen=True, slots=True)
class FleetKind:
    """What the replicas of a fleet are called, and the section of the config that has its limits.

    Example: FleetKind("teacher", "teacher") has teacher-0, teacher-1 and teacher.min_replicas.
    """

    name: str = "replica"
    section: str = "rollout"


POLICY = FleetKind()


class ReplicaFleet:
    """Owns one `Lifecycle` per replica, and keeps the router in step with them.

    Example of a replacement:
        await fleet.lose("replica-1", error)  # DEAD; "replica-2" is put into `wanted`
        name = await fleet.wanted.get()       # the operator starts it
        fleet.register(replica)               # its engine runs: updates and control reach it
        await fleet.admit(name, 7)            # its weights are verified: the router may choose it
    """

    def __init__(  # noqa: PLR0913
        self,
        replicas: Sequence[FleetMember],
        router: ReplicaRouter,
        min_replicas: int,
        report: Report,
        *,
        serving: int | None = None,
        max_replacements: int = 0,
        kind: FleetKind = POLICY,
        progress: Progress | None = None,
        answer_timeout_s: float = 5.0,
        events: DriverEvents = NO_EVENTS,
    ):
        """`report`: called whenever a replica leaves or comes. `serving`: version that the replicas
        serve already; None routes nothing to them before their first update. `events`: takes those of the replicas,
        which come with their progress. `kind`: whose replicas they are."""
        self.router = router
        self.progress = progress or Progress()
        self.answer_timeout_s = answer_timeout_s
        self.wanted: asyncio.Queue[str] = asyncio.Queue()
        """Names of replicas that are to be started."""
        self._min_replicas = min_replicas
        self._events = events
        self.report = report
        self._max_replacements = self._replacements_left = max_replacements
        self._kind = kind
        self.lives: dict[str, Lifecycle] = {}
        """State of every replica by name, dead ones included."""
        self.reasons: dict[str, str] = {}
        """Why a replica is not in service, where somebody said it."""
        self._replicas: dict[str, FleetMember] = {}
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._pinned: set[str] = set()
        self._expected: Collection[str] = ()
        self._endings: dict[str, asyncio.Task[bool]] = {}
        self._lost_at: dict[str, float] = {}  # replacement -> when the replica that it replaces was lost
        self._recovery_s = 0.0
        self._num_lost = self._num_replaced = 0
        self._initial = frozenset(replica.name for replica in replicas)
        self._next_number = len(replicas)
        for replica in replicas:
            self.lives[replica.name] = Lifecycle(replica.name)
            self.register(replica)
            if serving is None:
                router.expect(replica.name, RuntimeError("no weights yet"))
            else:
                self.lives[replica.name].verified(serving)

    @property
    def running(self) -> list[FleetMember]:
        """Replicas whose engine runs, in service or not."""
        return self._in(*CAN_SERVE, ReplicaState.DRAINING)

    @property
    def targets(self) -> list[FleetMember]:
        """Replicas that take weight updates: those that can serve, except the pinned ones."""
        return [replica for replica in self._in(*CAN_SERVE) if replica.name not in self._pinned]

    def _in(self, *states: ReplicaState) -> list[FleetMember]:
        return [replica for name, replica in self._replicas.items() if self.lives[name].state in states]

    def node_of(self, name: str) -> str | None:
        """The node that runs the replica; None before its engine runs."""
        return self._replicas[name].node if name in self._replicas else None

    def gauges(self) -> dict[str, float]:
        """`rollout/recovery_s`: seconds from the last loss that was made good until its replacement was in service."""
        return {
            "rollout/replicas_ready": float(len(self._in(ReplicaState.READY))),
            "rollout/replicas_lost": float(self._num_lost),
            "rollout/replicas_replaced": float(self._num_replaced),
            "rollout/recovery_s": self._recovery_s,
        }

    # -- replicas that come --------------------------------------------------------------------------------------------

    def want(self) -> str:
        """Ask for one more replica. Returns the name under which it is to be started."""
        name = f"{self._kind.name}-{self._next_number}"
        self._next_number += 1
        self.lives[name] = Lifecycle(name)
        self.router.expect(name, RuntimeError("starting"))
        self.wanted.put_nowait(name)
        return name

    def register(self, replica: FleetMember) -> bool:
        """Add a replica whose engine runs. Returns False when it was removed while it started."""
        if self.lives[replica.name].state is not ReplicaState.STARTING:
            return False
        self.lives[replica.name].enter(ReplicaState.SYNCING)
        self._replicas[replica.name] = replica
        return True

    async def admit(self, name: str, global_steps: int) -> None:
        """Let the router choose the replica. The caller has verified that its weights are those of `global_steps`."""
        life = self.lives[name]
        if life.state not in CAN_SERVE:
            return  # it was lost, or began to drain, while it took the update
        before, was_new = life.state, life.global_steps < 0
        if before is not ReplicaState.SYNCING:
            life.enter(ReplicaState.SYNCING)
        life.verified(global_steps)
        self.reasons.pop(name, None)
        if name in self._lost_at:
            self._num_replaced += 1
            self._recovery_s = now() - self._lost_at.pop(name)
            text = f"{name} is in service, {self._recovery_s:.1f} s after the one it replaces was lost"
            self._tell(FleetEventKind.IN_SERVICE, name, text)
        elif before is ReplicaState.STALE:
            self._tell(FleetEventKind.IN_SERVICE, name, f"{name} is back in service")
        elif was_new and name not in self._initial:
            self._tell(FleetEventKind.IN_SERVICE, name, f"{name} is in service")
        await self.router.admit(name)

    # -- replicas that leave, for a while or for good ------------------------------------------------------------------

    async def eject(self, name: str, error: BaseException) -> None:
        """Route nothing more to the replica for now. Its requests in flight continue."""
        life = self.lives[name]
        if life.state in (ReplicaState.SYNCING, ReplicaState.READY):
            life.enter(ReplicaState.STALE)
            self.reasons[name] = str(error)
            self._tell(FleetEventKind.OUT_OF_SERVICE, name, f"{name} is out of service: {error}")
            await self.router.eject(name, error)

    async def pin(self, count: int, why: str) -> list[str]:
        """Take up to `count` replicas out of service and out of updates, but leave one in service. No update may be
        under way. Returns the names."""
        names = self.router.healthy[1:][-count:] if count else []
        for name in names:
            self._pinned.add(name)
            await self.eject(name, RuntimeError(why))
        return names

    def unpin(self, names: Collection[str]) -> None:
        """Let updates reach the replicas again, which bring them back into service."""
        self._pinned.difference_update(names)

    async def drain(self, name: str) -> None:
        """Route nothing more to the replica, for good. Raises FleetRefusalError."""
        self._require_spare(name)
        if (why := CANNOT_DRAIN.get(self.lives[name].state)) is not None:
            raise FleetRefusalError(f"{name} cannot be drained: {why}")
        self.lives[name].enter(ReplicaState.DRAINING)
        self.reasons[name] = "ends when its requests have"
        self._tell(FleetEventKind.DRAINING, name, f"{name} drains")
        await self.router.eject(name, RuntimeError("draining"))

    async def retire(self, name: str, why: str) -> None:
        """Shut down a replica that is no longer wanted, without a replacement. Idempotent. Raises FleetRefusalError."""
        self._require_spare(name)
        if self.lives[name].state is not ReplicaState.DEAD:
            self.reasons[name] = why
            self._tell(FleetEventKind.LEFT, name, f"{name} leaves: {why}")
            self._end(name, RuntimeError(f"{name} left: {why}"))
        await asyncio.shield(self._endings[name])

    async def give_up(self, name: str, error: BaseException) -> None:
        """Shut down a replica that failed, and replace it within rollout.max_replacements."""
        await asyncio.shield(self._loss(name, error))

    async def lose(self, name: str, error: BaseException) -> bool:
        """`give_up`, and check that enough replicas are left. Returns whether the replica could still report every
        token that it had sampled. Raises TooFewReplicasError."""
        ending = self._loss(name, error)
        self.require_enough(error)
        return await asyncio.shield(ending)

    def expect(self, names: Collection[str]) -> None:
        """These count as in service while they are out of it, because an update under way may bring them back."""
        self._expected = names

    def has_enough(self) -> bool:
        """As many replicas are in service now as rollout.min_replicas asks for."""
        return len(self._in(ReplicaState.READY)) >= self._min_replicas

    def require_enough(self, cause: BaseException) -> None:
        """Raises TooFewReplicasError when fewer than rollout.min_replicas are in service or will be."""
        returning = [r for r in self._in(ReplicaState.STALE) if r.name in self._pinned or r.name in self._expected]
        in_service = len(self._in(ReplicaState.READY)) + len(returning)
        states = [life.state for life in self.lives.values()]
        coming = states.count(ReplicaState.STARTING) + states.count(ReplicaState.SYNCING)
        if in_service + coming < self._min_replicas:
            section = self._kind.section
            left = f"{in_service} replicas are left in service, {section}.min_replicas={self._min_replicas}"
            if self._max_replacements:
                left += f", and {section}.max_replacements={self._max_replacements} are used up"
            raise TooFewReplicasError(f"{left}: {cause}") from cause

    def _require_spare(self, name: str) -> None:
        if name not in self.lives:
            names = ", ".join(known for known, life in self.lives.items() if life.state is not ReplicaState.DEAD)
            raise FleetRefusalError(f"{name}: there is no such replica; there are {names}")
        state = self.lives[name].state
        staying = CAN_SERVE if state in CAN_SERVE else (*CAN_SERVE, ReplicaState.STARTING)
        left = [other for other, life in self.lives.items() if other != name and life.state in staying]
        if state in staying and len(left) < self._min_replicas:
            raise FleetRefusalError(
                f"{name} cannot go: {len(left)} replicas would be left, rollout.min_replicas={self._min_replicas}"
            )

    def _loss(self, name: str, error: BaseException) -> asyncio.Task[bool]:
        """The shutdown of the lost replica. A loss that is reported twice counts once."""
        state = self.lives[name].state
        if state is not ReplicaState.DEAD:
            self._num_lost += 1
            self.reasons[name] = str(error)
            self._tell(FleetEventKind.GIVEN_UP, name, f"{name} is given up: {error}")
            self._end(name, error)
            if state is not ReplicaState.DRAINING and self._replacements_left > 0:
                self._replacements_left -= 1
                replacement = self.want()
                self._lost_at[replacement] = self._lost_at.pop(name, now())
                self._tell(FleetEventKind.STARTING, replacement, f"{replacement} is to replace {name}")
        return self._endings[name]

    def _tell(self, kind: FleetEventKind, name: str, text: str) -> None:
        self.report(FleetEvent(kind, name, text))

    def _end(self, name: str, error: BaseException) -> None:
        self.lives[name].enter(ReplicaState.DEAD)
        self.router.expect(name, error)
        self._endings[name] = asyncio.create_task(self._shut_down(name, error), name=f"end-{name}")

    async def _shut_down(self, name: str, error: BaseException) -> bool:
        """Kill the replica, after a last question for its progress: the requests that wait for its answers fail then,
        and are tried again from what is known. Returns whether it answered."""
        await self.router.remove(name, error)
        if name not in self._replicas:  # it was still starting
            return True
        try:
            return await self._answers(name)
        finally:
            self._replicas[name].kill()

    # -- progress ------------------------------------------------------------------------------------------------------

    async def take_progress(self, name: str) -> ProgressReport:
        """Ask the replica for its progress and store the answer. Raises NoProgressError when it cannot report."""
        async with self._asking[name]:  # what is known must not change between the question and the answer
            asked = self._events.clock()
            try:
                report = await self._replicas[name].progress(self.progress.known(name))
            except Exception as error:
                raise NoProgressError(f"{name} reported no progress: {error!r}") from error
            if report.events is not None:
                self._events.take(name, report.events, asked)
            self.progress.take(name, report)
            return report

    async def collect_progress(self, *names: str) -> None:
        """Ask these replicas, by default all that run, and store what comes within rollout.answer_timeout_s."""
        asked = names or [replica.name for replica in self.running]
        await asyncio.gather(*(self._answers(name) for name in asked if name in self._replicas))

    async def _answers(self, name: str) -> bool:
        """Ask the replica for its progress. Returns whether it answered in time: if not, the report before counts, and
        whether the replica is lost is for the monitor to decide."""
        try:
            async with within(self.answer_timeout_s, "rollout.answer_timeout_s", f"asking {name} for its progress"):
                await self.take_progress(name)
            return True
        except (NoProgressError, TimeoutError) as unanswered:
            logger.info("%s", unanswered)
            return False

    async def abort(self, name: str, request_ids: Collection[RequestId]) -> None:
        """End requests that nothing waits for any more, if the replica answers."""
        try:
            async with within(self.answer_timeout_s, "rollout.answer_timeout_s", f"abort on {name}"):
                await self._replicas[name].abort([str(request_id) for request_id in request_ids])
        except Exception as error:
            logger.info("%s may still run %d requests: %r", name, len(request_ids), error)


def now() -> float:
    """Seconds of the running event loop's clock."""
    return asyncio.get_running_loop().time()
