"""Who is in the fleet, in which state, and who takes the place of those that are lost."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from configs.runtime.deadline import within
from rollout.fleet.lifecycle import Lifecycle, ReplicaState
from rollout.fleet.member import FleetMember
from rollout.fleet.paused_time import PausedTime
from rollout.progress import Progress, ProgressReport
from rollout.router import ReplicaRouter

logger = logging.getLogger(__name__)
LAST_PROGRESS_S = 2.0
"""A lost replica is given so long to tell how far its trajectories are. Where only the engine died, it can."""
CAN_SERVE = (ReplicaState.SYNCING, ReplicaState.READY, ReplicaState.STALE)
"""Now, or after the next update."""


class TooFewReplicasError(RuntimeError):
    """Fewer replicas are left than rollout.min_replicas. The message says which were lost, and why."""


class NoProgressError(RuntimeError):
    """A replica could not say how far it is. The message names it, the cause says why."""


class FleetRefusalError(ValueError):
    """What was asked of the fleet cannot be. The message says what is allowed."""


class FleetMembers:
    """Owns one `Lifecycle` per replica; the router follows it."""

    def __init__(  # noqa: PLR0913
        self,
        replicas: Sequence[FleetMember],
        router: ReplicaRouter,
        min_replicas: int,
        report: Callable[[str], None],
        *,
        serving: int | None = None,
        max_replacements: int = 0,
        progress: Progress | None = None,
    ):
        """`replicas`: started. `serving`: the version they serve already; None: nothing is routed to them before their
        first update. `report`: told in a sentence who leaves and who comes. `max_replacements`: how many of those that
        are lost are put into `wanted` again."""
        self._router = router
        self._min_replicas = min_replicas
        self._report = report
        self._max_replacements = self._replacements_left = max_replacements
        self._progress = progress or Progress()
        self._lives: dict[str, Lifecycle] = {}
        self._replicas: dict[str, FleetMember] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        self._pinned: set[str] = set()
        self._endings: dict[str, asyncio.Task[bool]] = {}
        self._lost_at: dict[str, float] = {}  # replacement -> when the one that it replaces was lost
        self._recovery_s = 0.0
        self._num_lost = self._num_replaced = 0
        self._initial = frozenset(replica.name for replica in replicas)
        self._next_number = len(replicas)
        self.paused = PausedTime()
        self.wanted: asyncio.Queue[str] = asyncio.Queue()
        """Names of replicas that are to be started."""
        for replica in replicas:
            self._lives[replica.name] = Lifecycle(replica.name)
            self._joined(replica)
            if serving is None:
                router.expect(replica.name, RuntimeError("no weights yet"))
            else:
                self._lives[replica.name].verified(serving)

    @property
    def lives(self) -> Mapping[str, Lifecycle]:
        """Of every replica there ever was."""
        return self._lives

    @property
    def running(self) -> list[FleetMember]:
        """Those whose engine runs, in service or not."""
        return self._in(*CAN_SERVE, ReplicaState.DRAINING)

    @property
    def targets(self) -> list[FleetMember]:
        """What updates of the weights go to: not those that are pinned to a version."""
        return [replica for replica in self._in(*CAN_SERVE) if replica.name not in self._pinned]

    def _in(self, *states: ReplicaState) -> list[FleetMember]:
        return [replica for name, replica in self._replicas.items() if self._lives[name].state in states]

    def node_of(self, name: str) -> str | None:
        """None before its engine runs."""
        return self._replicas[name].node if name in self._replicas else None

    # -- who comes -----------------------------------------------------------------------------------------------------

    def want(self) -> str:
        """One more replica: its name, under which it is to be started."""
        name = f"replica-{self._next_number}"
        self._next_number += 1
        self._lives[name] = Lifecycle(name)
        self._router.expect(name, RuntimeError("starting"))
        self.wanted.put_nowait(name)
        return name

    def joined(self, replica: FleetMember) -> bool:
        """Its engine runs. False when it is not wanted any more."""
        if self._lives[replica.name].state is not ReplicaState.STARTING:
            return False
        self._joined(replica)
        return True

    def _joined(self, replica: FleetMember) -> None:
        self._lives[replica.name].started()
        self._replicas[replica.name] = replica
        self._asking[replica.name] = asyncio.Lock()

    async def admit(self, name: str, global_steps: int) -> None:
        """Route to it (again). The caller has verified that its weights are those of `global_steps`."""
        life = self._lives[name]
        if life.state not in CAN_SERVE:
            return  # it was lost, or began to drain, while it took the update
        before, was_new = life.state, life.global_steps < 0
        if before is not ReplicaState.SYNCING:
            life.sync()
        life.verified(global_steps)
        if name in self._lost_at:
            self._num_replaced += 1
            self._recovery_s = now() - self._lost_at.pop(name)
            self._report(f"{name} is in service, {self._recovery_s:.1f} s after the one it replaces was lost")
        elif before is ReplicaState.STALE:
            self._report(f"{name} is back in service")
        elif was_new and name not in self._initial:
            self._report(f"{name} is in service")
        await self._router.admit(name)

    # -- who leaves ----------------------------------------------------------------------------------------------------

    async def eject(self, name: str, error: BaseException) -> None:
        """Route nothing more to it for now. What it is doing goes on."""
        life = self._lives[name]
        if life.state in (ReplicaState.SYNCING, ReplicaState.READY):
            life.miss()
            self._report(f"{name} is out of service: {error}")
            await self._router.eject(name, error)

    async def pin(self, count: int, why: str) -> list[str]:
        """Take up to `count` replicas out of service and out of updates; one is left in service. What they are doing
        goes on. Their names. The caller sees to it that no update is under way."""
        names = self._router.healthy[1:][-count:] if count else []
        for name in names:
            self._pinned.add(name)
            await self.eject(name, RuntimeError(why))
        return names

    def unpin(self, names: Collection[str]) -> None:
        """Updates go to them again. The next one, or catching up, brings them back into service."""
        self._pinned.difference_update(names)

    async def drain(self, name: str) -> None:
        """Route nothing more to it, for good: it finishes what it has. Raises IllegalTransitionError, and
        FleetRefusalError when too few would be left."""
        self._require_spare(name)
        self._lives[name].drain()
        self._report(f"{name} drains")
        await self._router.eject(name, RuntimeError("draining"))

    async def retire(self, name: str, why: str) -> None:
        """End it in good order: what it is generating goes on elsewhere. Nothing replaces it. Idempotent."""
        self._require_spare(name)
        if self._lives[name].state is not ReplicaState.DEAD:
            self._end(name, f"{name} leaves: {why}", RuntimeError(f"{name} left: {why}"))
        await asyncio.shield(self._endings[name])

    async def give_up(self, name: str, error: BaseException) -> None:
        """End it for good. Who else tells of the same loss waits until it has been dealt with."""
        await asyncio.shield(self._loss(name, error))

    async def lose(self, name: str, error: BaseException) -> bool:
        """It died. Whether it could tell, to the last token, what it had sampled. Raises TooFewReplicasError."""
        ending = self._loss(name, error)
        self.require_enough(error)
        return await asyncio.shield(ending)

    def require_enough(self, cause: BaseException) -> None:
        """Raises TooFewReplicasError when fewer than rollout.min_replicas are in service or on their way there."""
        pinned = [replica for replica in self._in(ReplicaState.STALE) if replica.name in self._pinned]  # they come back
        in_service = len(self._in(ReplicaState.READY)) + len(pinned)
        states = [life.state for life in self._lives.values()]
        coming = states.count(ReplicaState.STARTING) + states.count(ReplicaState.SYNCING)
        if in_service + coming < self._min_replicas:
            left = f"{in_service} replicas are left in service, rollout.min_replicas={self._min_replicas}"
            if self._max_replacements:
                left += f", and rollout.max_replacements={self._max_replacements} are used up"
            raise TooFewReplicasError(f"{left}: {cause}") from cause

    def _require_spare(self, name: str) -> None:
        if name not in self._lives:
            names = ", ".join(known for known, life in self._lives.items() if life.state is not ReplicaState.DEAD)
            raise FleetRefusalError(f"{name}: there is no such replica; there are {names}")
        state = self._lives[name].state
        staying = CAN_SERVE if state in CAN_SERVE else (*CAN_SERVE, ReplicaState.STARTING)
        left = [other for other, life in self._lives.items() if other != name and life.state in staying]
        if state in staying and len(left) < self._min_replicas:
            raise FleetRefusalError(
                f"{name} cannot go: {len(left)} replicas would be left, rollout.min_replicas={self._min_replicas}"
            )

    def _loss(self, name: str, error: BaseException) -> asyncio.Task[bool]:
        """What deals with it. A loss that is told twice is one."""
        state = self._lives[name].state
        if state is not ReplicaState.DEAD:
            self._num_lost += 1
            self._end(name, f"{name} is given up: {error}", error)
            if state is not ReplicaState.DRAINING:
                self._replace(name)
        return self._endings[name]

    def _end(self, name: str, text: str, error: BaseException) -> None:
        self._lives[name].die()
        self.paused.told(name, False)
        self._report(text)
        self._router.expect(name, error)
        self._endings[name] = asyncio.create_task(self._bury(name, error), name=f"end-{name}")

    def _replace(self, name: str) -> None:
        if self._replacements_left > 0:
            self._replacements_left -= 1
            replacement = self.want()
            self._lost_at[replacement] = self._lost_at.pop(name, now())
            self._report(f"{replacement} is to replace {name}")

    async def _bury(self, name: str, error: BaseException) -> bool:
        """Whoever was waiting for its answers is told by its death, so what it knows is asked for before."""
        await self._router.remove(name, error)
        if name not in self._replicas:  # it was still starting
            return True
        try:
            async with within(LAST_PROGRESS_S, "LAST_PROGRESS_S", f"asking {name} for its last progress"):
                await self.take_progress(name)
            return True
        except (NoProgressError, TimeoutError) as unanswered:  # the report before counts
            logger.info("%s", unanswered)
            return False
        finally:
            self._replicas[name].kill()

    async def take_progress(self, name: str) -> ProgressReport:
        """Asks the replica, and hands what it says to the store. Raises NoProgressError when it cannot tell."""
        async with self._asking[name]:  # what is known must not change between the question and the answer
            try:
                report = await self._replicas[name].progress(self._progress.known(name))
            except Exception as error:
                raise NoProgressError(f"{name} told no progress: {error!r}") from error
            self._progress.take(name, report)
            self.paused.told(name, report.paused and self._lives[name].state is not ReplicaState.DEAD)
            return report

    async def ask(self, *names: str) -> None:
        """Progress of these replicas, by default of all, now, as far as they answer in time. Who does not is the
        monitor's to judge."""
        asked = [name for name in names or [r.name for r in self.running] if name in self._asking]
        asking = [asyncio.create_task(self.take_progress(name)) for name in asked]
        if asking:
            _, late = await asyncio.wait(asking, timeout=LAST_PROGRESS_S)
            for task in late:
                task.cancel()
        for answer in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(answer, Exception) and not isinstance(answer, NoProgressError):
                raise answer

    # -- gauges --------------------------------------------------------------------------------------------------------

    def member_gauges(self) -> dict[str, float]:
        """`rollout/recovery_s`: from the last loss that was made good to its replacement's being in service."""
        return {
            "rollout/replicas_ready": float(len(self._in(ReplicaState.READY))),
            "rollout/replicas_lost": float(self._num_lost),
            "rollout/replicas_replaced": float(self._num_replaced),
            "rollout/recovery_s": self._recovery_s,
        }


def now() -> float:
    """Seconds of the running event loop's clock."""
    return asyncio.get_running_loop().time()
