"""The replicas of a run: which belong to the fleet, in which state each is, and what replaces a lost one."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from configs.runtime.deadline import within
from rollout.errors import TooFewReplicasError
from rollout.events.driver import NO_EVENTS, DriverEvents
from rollout.events.kinds import FleetEvent, FleetEventKind, Report
from rollout.fleet.concurrency import AdaptiveConcurrency, Look
from rollout.progress import Progress, ProgressReport
from rollout.replica.lifecycle import CAN_SERVE, CANNOT_DRAIN, FleetMember, FleetRefusalError, Replica, ReplicaState
from rollout.request_ids import RequestId
from rollout.router import ReplicaRouter

logger = logging.getLogger(__name__)


class NoProgressError(RuntimeError):
    """A replica could not report its progress. The message names it, the cause says why."""


@dataclass(frozen=True, slots=True)
class FleetKind:
    """The names of a fleet's replicas, and the section of the config that has its limits.

    Example: FleetKind("teacher", "teacher") has teacher-0, teacher-1 and teacher.min_replicas.
    """

    name: str = "replica"
    section: str = "rollout"


POLICY = FleetKind()


class ReplicaFleet:
    """Owns the record of every replica (`Replica`) and is the only one to change it. The router and the checkpoint
    manager see the same records.

    Example of a replacement:
        await fleet.lose("replica-1", error)  # DEAD; "replica-2" is put into `wanted`
        name = await fleet.wanted.get()       # the operator starts it
        fleet.register(replica)               # its engine runs: updates and control reach it
        await fleet.admit(name, 7)            # its weights are verified: the router may choose it
    """

    def __init__(  # noqa: PLR0913
        self,
        replicas: Sequence[FleetMember],
        max_inflight: int,
        min_replicas: int,
        report: Report,
        *,
        serving: int | None = None,
        max_replacements: int = 0,
        kind: FleetKind = POLICY,
        progress: Progress | None = None,
        answer_timeout_s: float = 5.0,
        events: DriverEvents = NO_EVENTS,
        concurrency: AdaptiveConcurrency | None = None,
    ):
        """
        Args:
            replicas: those that the run begins with, whose engines run or are about to.
            max_inflight: trajectories that are routed to one replica at most.
            report: called whenever a replica leaves or comes.
            serving: the version that the replicas serve already; None routes nothing to them before their first update.
            kind: says whose replicas they are.
            events: takes the events of the replicas, which come with their progress.
            concurrency: changes `max_inflight` by what replicas report; None leaves it as it is.
        """
        self.replicas: dict[str, Replica] = {}
        """The record of every replica by name, dead ones included."""
        self.router = ReplicaRouter(self.replicas, max_inflight)
        self.progress = progress or Progress()
        self.answer_timeout_s = answer_timeout_s
        self.report = report
        self.wanted: asyncio.Queue[str] = asyncio.Queue()
        """Names of replicas that are to be started."""
        self.is_out_of_replacements = False
        """A loss was not replaced, because as many as allowed had been."""
        self.max_replacements = self._replacements_left = max_replacements
        self._min_replicas = min_replicas
        self._kind = kind
        self._events = events
        self._concurrency = concurrency
        self._recovery_s = 0.0
        self._num_lost = self._num_replaced = 0
        for replica in replicas:
            self.replicas[replica.name] = record = Replica(name=replica.name)
            self.register(replica)
            if serving is not None:
                record.enter_service(serving)

    @property
    def running(self) -> list[FleetMember]:
        """Replicas whose engine runs, in service or not."""
        return self._handles(self._in(*CAN_SERVE, ReplicaState.DRAINING))

    @property
    def targets(self) -> list[FleetMember]:
        """Replicas that take weight updates: those that can serve, except the pinned ones."""
        return self._handles(replica for replica in self._in(*CAN_SERVE) if not replica.pinned)

    @property
    def held_versions(self) -> dict[str, int]:
        """Replica -> the tag of the weights that it is known to hold now, dead ones included."""
        return {name: replica.version for name, replica in self.replicas.items() if replica.is_verified}

    def _handles(self, replicas: Iterable[Replica]) -> list[FleetMember]:
        return [replica.handle for replica in replicas if replica.handle is not None]

    def _in(self, *states: ReplicaState) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state in states]

    def gauges(self) -> dict[str, float]:
        """Return the fleet's metrics. `rollout/recovery_s`: seconds from the last loss that was made good until its
        replacement was in service."""
        return {
            "rollout/replicas_ready": float(len(self._in(ReplicaState.READY))),
            "rollout/replicas_lost": float(self._num_lost),
            "rollout/replicas_replaced": float(self._num_replaced),
            "rollout/recovery_s": self._recovery_s,
        }

    # -- replicas that come --------------------------------------------------------------------------------------------

    def want(self) -> str:
        """Ask for one more replica. Returns the name under which it is to be started."""
        name = f"{self._kind.name}-{len(self.replicas)}"  # records are never removed, so that no name comes twice
        self.replicas[name] = Replica(name=name, is_addition=True)
        self.wanted.put_nowait(name)
        return name

    def want_successor(self, name: str) -> str:
        """Ask for a replica in the place of another that is about to go, whose loss then asks for none."""
        successor = self.replicas[name].successor = self.want()
        return successor

    def register(self, replica: FleetMember) -> bool:
        """Add a replica whose engine runs. Returns False when it was removed while it started."""
        record = self.replicas[replica.name]
        if record.state is not ReplicaState.STARTING:
            return False
        record.enter(ReplicaState.SYNCING)
        record.handle = replica
        return True

    async def admit(self, name: str, global_steps: int) -> None:
        """Let the router choose the replica. The caller has verified that its weights are those of `global_steps`."""
        replica = self.replicas[name]
        before, was_new = replica.state, replica.version < 0
        replica.mark_verified(global_steps)
        if before not in CAN_SERVE:
            return  # it was lost, or began to drain, while it took the update
        if replica.replaces_lost_at is not None:
            self._num_replaced += 1
            self._recovery_s = now() - replica.replaces_lost_at
            replica.replaces_lost_at = None
            text = f"{name} is in service, {self._recovery_s:.1f} s after the one it replaces was lost"
            self._tell(FleetEventKind.IN_SERVICE, name, text)
        elif before is ReplicaState.STALE:
            self._tell(FleetEventKind.IN_SERVICE, name, f"{name} is back in service")
        elif was_new and replica.is_addition:
            self._tell(FleetEventKind.IN_SERVICE, name, f"{name} is in service")
        await self.router.admit(name, global_steps)

    # -- weight updates ------------------------------------------------------------------------------------------------

    @contextmanager
    def update_under_way(self) -> Iterator[None]:
        """Count the replicas that take part in an update as in service, even ejected ones: it may bring them back."""
        for target in self.targets:
            self.replicas[target.name].expected = True
        try:
            yield
        finally:
            for replica in self.replicas.values():
                replica.expected = False

    def mark_unverified(self, names: Collection[str]) -> None:
        """Note that nobody knows any more which weights these replicas hold: an update is about to change them."""
        for name in names:
            self.replicas[name].is_verified = False

    def silence(self, name: str) -> str | None:
        """Return the reason why an update goes on without the replica, if others answer; None while it answers."""
        watch = self.replicas[name].watch
        return None if watch is None else watch.silence

    def count_miss(self, name: str) -> int:
        """Note that an update did not reach the replica. Returns how many in a row did not."""
        self.replicas[name].misses += 1
        return self.replicas[name].misses

    # -- replicas that leave, for a while or for good ------------------------------------------------------------------

    async def eject(self, name: str, error: BaseException) -> None:
        """Route nothing more to the replica for now. Its requests in flight continue."""
        if self.replicas[name].leave_service(error):
            self._tell(FleetEventKind.OUT_OF_SERVICE, name, f"{name} is out of service: {error}")

    async def pin(self, count: int, why: str) -> list[str]:
        """Take up to `count` replicas out of service and out of updates, but leave one in service. No update may be
        under way. Returns the names."""
        names = self.router.healthy[1:][-count:] if count else []
        for name in names:
            self.replicas[name].pinned = True
            await self.eject(name, RuntimeError(why))
        return names

    def unpin(self, names: Collection[str]) -> None:
        """Let updates reach the replicas again, which bring them back into service."""
        for name in names:
            self.replicas[name].pinned = False

    async def drain(self, name: str) -> None:
        """Route nothing more to the replica, for good. Raises FleetRefusalError."""
        replica = self._require_spare(name)
        if (why := CANNOT_DRAIN.get(replica.state)) is not None:
            raise FleetRefusalError(f"{name} cannot be drained: {why}")
        replica.enter(ReplicaState.DRAINING)
        replica.reason = RuntimeError("ends when its requests have")
        self._tell(FleetEventKind.DRAINING, name, f"{name} drains")
        self.router.wake()

    async def retire(self, name: str, why: str) -> None:
        """Shut down a replica that is no longer wanted, without a replacement. Idempotent. Raises FleetRefusalError."""
        replica = self._require_spare(name)
        if not replica.is_dead:
            self._tell(FleetEventKind.LEFT, name, f"{name} leaves: {why}")
            self._end(replica, RuntimeError(why))
            for other in self.replicas.values():
                other.successor = None if other.successor == name else other.successor
        await self._ended(replica)

    async def give_up(self, name: str, error: BaseException) -> None:
        """Shut down a replica that failed, and replace it within rollout.max_replacements."""
        replica = self.replicas[name]
        self._count_loss(replica, error)
        await self._ended(replica)

    async def lose(self, name: str, error: BaseException) -> bool:
        """`give_up`, and check that enough replicas are left. Returns whether the replica could still report every
        token that it had sampled. Raises TooFewReplicasError."""
        replica = self.replicas[name]
        self._count_loss(replica, error)
        self.require_enough(error)
        return await self._ended(replica)

    def has_enough(self) -> bool:
        """Return whether as many replicas are in service now as rollout.min_replicas asks for."""
        return len(self._in(ReplicaState.READY)) >= self._min_replicas

    def require_enough(self, cause: BaseException) -> None:
        """Raise TooFewReplicasError if fewer than rollout.min_replicas are in service or will be."""
        returning = [
            replica
            for replica in self._in(ReplicaState.STALE)
            if replica.pinned or replica.expected or self.silence(replica.name)  # until it answers, or is lost
        ]
        in_service = len(self._in(ReplicaState.READY)) + len(returning)
        coming = len(self._in(ReplicaState.STARTING, ReplicaState.SYNCING))
        if in_service + coming < self._min_replicas:
            section = self._kind.section
            left = f"{in_service} replicas are left in service, {section}.min_replicas={self._min_replicas}"
            if self.max_replacements:
                left += f", and {section}.max_replacements={self.max_replacements} are used up"
            raise TooFewReplicasError(f"{left}: {cause}") from cause

    def _require_spare(self, name: str) -> Replica:
        """Return the replica, if the run can do without it. Raises FleetRefusalError."""
        if name not in self.replicas:
            names = ", ".join(replica.name for replica in self.replicas.values() if not replica.is_dead)
            raise FleetRefusalError(f"{name}: there is no such replica; there are {names}")
        replica = self.replicas[name]
        staying = CAN_SERVE if replica.state in CAN_SERVE else (*CAN_SERVE, ReplicaState.STARTING)
        num_left = len([other for other in self._in(*staying) if other is not replica])
        if replica.state in staying and num_left < self._min_replicas:
            limit = f"{self._kind.section}.min_replicas={self._min_replicas}"
            raise FleetRefusalError(f"{name} cannot go: {num_left} replicas would be left, {limit}")
        return replica

    def _count_loss(self, replica: Replica, error: BaseException) -> None:
        """Begin to end a lost replica, and to replace it. A loss that is reported twice counts once."""
        if replica.is_dead:
            return
        self._num_lost += 1
        is_missed = replica.state is not ReplicaState.DRAINING and replica.successor is None
        self._tell(FleetEventKind.GIVEN_UP, replica.name, f"{replica.name} is given up: {error}")
        self._end(replica, error)
        if is_missed and not self._replacements_left:
            self.is_out_of_replacements = True
        elif is_missed:
            self._replacements_left -= 1
            replacement = self.replicas[self.want()]
            # The time counts from the first loss in a row: a replacement that is lost before it serves made none good.
            replacement.replaces_lost_at = now() if replica.replaces_lost_at is None else replica.replaces_lost_at
            text = f"{replacement.name} is to replace {replica.name}"
            self._tell(FleetEventKind.STARTING, replacement.name, text)

    def _tell(self, kind: FleetEventKind, name: str, text: str) -> None:
        self.report(FleetEvent(kind, name, text))

    def _end(self, replica: Replica, error: BaseException) -> None:
        replica.enter(ReplicaState.DEAD)
        replica.reason = error
        # Waiters look again only when this call is over, which may first ask for a replacement to wait for.
        self.router.wake()
        replica.ending = asyncio.create_task(self._shut_down(replica), name=f"end-{replica.name}")

    async def _ended(self, replica: Replica) -> bool:
        """Wait until a dead replica's processes are gone. Returns whether it could report its progress before."""
        assert replica.ending is not None
        return await asyncio.shield(replica.ending)  # it ends also if the caller is cancelled

    async def _shut_down(self, replica: Replica) -> bool:
        """Kill the replica, after a last question for its progress: the requests that wait for its answers fail then,
        and are tried again from what is known. Returns whether it answered."""
        if replica.handle is None:  # it was still starting
            return True
        try:
            return await self._answers(replica)
        finally:
            replica.handle.kill()

    # -- progress ------------------------------------------------------------------------------------------------------

    async def take_progress(self, replica: Replica) -> ProgressReport:
        """Ask a replica for its progress and store the answer. Raises NoProgressError when it cannot report."""
        assert replica.handle is not None
        async with replica.asking:  # what is known must not change between the question and the answer
            asked_at = self._events.clock()
            try:
                report = await replica.handle.progress(self.progress.known(replica.name))
            except Exception as error:
                raise NoProgressError(f"{replica.name} reported no progress: {error!r}") from error
            if report.events is not None:
                self._events.take(replica.name, report.events, asked_at)
            self.progress.take(replica.name, report)
            if self._concurrency is not None:
                self.router.limit(self._concurrency.take(replica.name, _look(replica, report)))
            return report

    async def collect_progress(self, *names: str) -> None:
        """Ask these replicas, by default all that run, and store what comes within rollout.answer_timeout_s."""
        chosen = [self.replicas[name] for name in names] or self._in(*CAN_SERVE, ReplicaState.DRAINING)
        await asyncio.gather(*(self._answers(replica) for replica in chosen if replica.handle is not None))

    async def _answers(self, replica: Replica) -> bool:
        """Ask the replica for its progress. Returns whether it answered in time: if not, the report before counts, and
        whether the replica is lost is for the monitor to decide."""
        what = f"asking {replica.name} for its progress"
        try:
            async with within(self.answer_timeout_s, "rollout.answer_timeout_s", what):
                await self.take_progress(replica)
            return True
        except (NoProgressError, TimeoutError) as unanswered:
            logger.info("%s", unanswered)
            return False

    async def abort(self, name: str, request_ids: Collection[RequestId]) -> None:
        """End requests that nothing waits for any more, if the replica answers."""
        handle = self.replicas[name].handle
        if handle is None:
            return
        try:
            async with within(self.answer_timeout_s, "rollout.answer_timeout_s", f"abort on {name}"):
                await handle.abort([str(request_id) for request_id in request_ids])
        except Exception as error:
            logger.info("%s may still run %d requests: %r", name, len(request_ids), error)


def now() -> float:
    """Return the seconds of the running event loop's clock."""
    return asyncio.get_running_loop().time()


def _look(replica: Replica, report: ProgressReport) -> Look:
    return Look(
        time=now(),
        in_flight=replica.in_flight,
        assigned=replica.assigned,
        tokens=report.tokens,
        turns=report.turns,
        again=report.computed_again,
        inside=report.running,
        waiting=report.waiting,
        kv_usage=report.kv_usage,
        is_steady=replica.state is ReplicaState.READY and not replica.visits and not report.paused,
    )
