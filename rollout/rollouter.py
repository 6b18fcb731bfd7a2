"""The producing loop: prompts in, trajectory groups out, as fast as slots and replicas allow."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from configs.runtime.deadline import within
from rollout.buffer import TrajectoryBuffer
from rollout.errors import AgentWorkerLostError, EpisodesLostError, ReplicaLostError, TooFewReplicasError
from rollout.events.event import Emit, nobody
from rollout.events.kinds import GroupClaimed, GroupMoved
from rollout.fleet.fleet import ReplicaFleet
from rollout.progress import Attempt, PartialCompletion
from rollout.prompts import PromptStream
from rollout.request_ids import InGroup
from rollout.router import ReplicaRouter
from rollout.staleness import Slot
from rollout.teacher.teacher import Teacher
from rollout.types import DiscardedGroup, DiscardReason, Prompt, SamplingParams, TrajectoryGroup

logger = logging.getLogger(__name__)
LOSSES_BEFORE_ALONE = 2
"""A group that lost this many agent workers runs in a process of its own. It is for a reward or an agent loop that
crashes its process on one prompt: alone it can be blamed, and the other groups of that process cannot."""
ALONE_AT_ONCE = 4


class GroupRunner(Protocol):
    """The agent workers."""

    async def run_group(
        self,
        prompt: Prompt,
        replica: str,
        sampling: SamplingParams,
        group_size: int,
        attempt: Attempt,
        *,
        on_open: Callable[[int], None],
    ) -> TrajectoryGroup:
        """Run the agent loops of a group on one replica, and its rewards. Raises ReplicaLostError, EpisodesLostError
        and AgentWorkerLostError.

        `on_open`: told how many episodes are still open, which ask the replica for more, whenever some have ended."""
        ...


@dataclass(slots=True)
class _Room:
    """What an attempt at a group holds of a replica's room: less and less, as its episodes end."""

    router: ReplicaRouter
    replica: str
    held: int
    """Trajectories."""

    def keep(self, num_open: int) -> None:
        """Give back what more than `num_open` episodes have. What is told late or twice gives nothing back."""
        if num_open < self.held:
            self.router.release(self.replica, self.held - num_open)
            self.held = num_open


@dataclass(slots=True, kw_only=True)
class GroupUnderWay:
    slot: Slot
    prompt: Prompt
    attempt: Attempt = field(default_factory=Attempt)
    failures: int = 0
    losses: int = 0
    """Agent workers that died while they ran it, together with other groups: it may or may not be the cause."""


@dataclass(kw_only=True)
class Rollouter:
    """Turns every dispatched prompt into exactly one group in the buffer, or counts it as failed, or ends the run with
    the error. Tokens sampled before a replica was lost, or a run ended, are never sampled again.

    Example of the events of one prompt:
        router.acquire -> buffer.claim -> stream.next -> runner.run_group, which raises ReplicaLostError
        -> fleet.lose -> router.acquire -> runner.run_group of attempt 1, which begins with the tokens that attempt 0
        had sampled -> teacher.score, if there is a teacher -> buffer.put
    """

    stream: PromptStream
    buffer: TrajectoryBuffer
    fleet: ReplicaFleet
    runner: GroupRunner
    updating: asyncio.Lock
    """The checkpoint manager holds it while replicas change version."""
    sampling: SamplingParams
    group_size: int
    group_timeout_s: float
    teacher: Teacher | None = None
    """Scores every group before the buffer gets it."""
    emit: Emit = nobody
    replayable: bool = True
    """Whether episodes that run again from their beginning hear what was sampled for them before. With false they get
    new answers, and only those that wait for another replica go on from their tokens."""
    under_way: dict[int, GroupUnderWay] = field(default_factory=dict, init=False)
    """Ordinal -> group. Those of the run that is resumed are in here when the run starts, and are dispatched first."""
    counters: dict[str, int] = field(init=False)
    """Trajectories. `moved` continued elsewhere from the tokens they had; `restarted` were lost before any token of
    theirs was known."""

    def __post_init__(self) -> None:
        self.counters = {"trajectories_started": 0, "moved": 0, "restarted": 0}
        self._router, self._progress = self.fleet.router, self.fleet.progress
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)

    async def run(self) -> None:
        """Consume free slots and room on replicas, produce groups, return when the buffer needs no more."""
        async with asyncio.TaskGroup() as groups:
            for group in list(self.under_way.values()):
                group.attempt = self._anew(group.attempt)
                self._start(groups, group, await self._router.acquire(self.group_size))
            while True:
                # Room first, slot second: a slot's staleness counts from its claim, so it must not wait for room.
                replica = await self._router.acquire(self.group_size)
                slot = None
                try:
                    slot = await self.buffer.claim()
                finally:
                    if slot is None:
                        self._router.release(replica, self.group_size)
                if slot is None:
                    return
                if replica not in self._router.healthy:  # ejected by the update that freed the slot
                    self._router.release(replica, self.group_size)
                    replica = await self._router.acquire(self.group_size)
                group = GroupUnderWay(slot=slot, prompt=self.stream.next())
                self.under_way[group.prompt.ordinal] = group
                self.counters["trajectories_started"] += self.group_size
                self.emit(GroupClaimed(ordinal=group.prompt.ordinal, replica=replica))
                self._start(groups, group, replica)

    def _start(self, groups: asyncio.TaskGroup, group: GroupUnderWay, replica: str) -> None:
        room = _Room(self._router, replica, self.group_size)
        task = groups.create_task(self._produce(group, room))
        task.add_done_callback(lambda _: room.keep(0))  # also if the run ends before its first step

    def left_over(self) -> list[DiscardedGroup]:
        """What a run that ended had begun and did not need, because it was resumed with fewer steps."""
        ready = {group.prompt.ordinal: group for group in self.buffer.ready}
        ordinals = sorted({*ready, *self.under_way, *self.stream.returned})
        return [
            DiscardedGroup(
                prompt=self.stream.at(ordinal),
                reason=DiscardReason.unneeded,
                trajectories=ready[ordinal].trajectories if ordinal in ready else (),
            )
            for ordinal in ordinals
        ]

    async def _produce(self, group: GroupUnderWay, room: "_Room") -> None:
        """Try the group until it is complete or given up, always under the same slot."""
        ordinal = group.prompt.ordinal
        while True:
            replica = room.replica
            try:
                finished = await self._attempt(group, room)
            except ReplicaLostError as error:
                all_known = await self.fleet.lose(replica, error)
                self._count_lost(self._progress.partials(ordinal), all_known)
                self._begin_next(group, waits=not group.attempt.alone)
                self._tell_moved(group, error)
            except EpisodesLostError as error:
                logger.warning("prompt %d begins anew: %s", ordinal, error)
                await self._take_back(group, replica)
                self._tell_moved(group, error)
            except TooFewReplicasError:  # of the teacher: no other attempt would have one
                raise
            except Exception as error:
                is_failure = self._is_failure(group, error)
                await self._take_back(group, replica)
                if is_failure and self.buffer.failures.gives_up(ordinal, group.failures, error):
                    await self.buffer.fail(group.slot, group.prompt, error)
                    return self._forget(ordinal)
                self._tell_moved(group, error)
            else:
                await self.buffer.put(group.slot, finished)
                return self._forget(ordinal)
            room = await self._room(group)

    def _tell_moved(self, group: GroupUnderWay, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        self.emit(GroupMoved(ordinal=group.prompt.ordinal, attempt=group.attempt.number, why=why))

    def _is_failure(self, group: GroupUnderWay, error: Exception) -> bool:
        """Whether the error counts against the group. Of the groups that an agent worker takes with it at most one is
        the cause: the one whose own process dies too, when it runs alone, and the others are cleared."""
        ordinal = group.prompt.ordinal
        if isinstance(error, AgentWorkerLostError):
            if not group.attempt.alone:
                group.losses += 1
                logger.warning("prompt %d continues elsewhere: %s", ordinal, error)
                return False
            for other in self.under_way.values():
                if not other.attempt.alone:
                    other.losses = 0
        group.failures += 1
        logger.warning("prompt %d failed (%d)", ordinal, group.failures, exc_info=error)
        return True

    async def _take_back(self, group: GroupUnderWay, replica: str) -> None:
        """Take what the group has sampled on a replica that lives into its next attempt, and end its requests there."""
        await self.fleet.collect_progress(replica)
        running = self._progress.running(group.prompt.ordinal)
        self._begin_next(group, waits=False)
        if running:
            await self.fleet.abort(replica, running)

    def _begin_next(self, group: GroupUnderWay, *, waits: bool) -> None:
        """End the attempt. Later reports about it are ignored: its requests may have been aborted. `waits`: whether its
        episodes wait for the next one in their agent worker."""
        ordinal = group.prompt.ordinal
        attempt = Attempt(number=group.attempt.number + 1, partials=self._progress.partials(ordinal))
        group.attempt = attempt if waits else self._anew(attempt)
        self._progress.end(ordinal)

    def _anew(self, attempt: Attempt) -> Attempt:
        """The attempt, for episodes that begin anew."""
        return attempt if self.replayable else replace(attempt, partials={})

    async def _room(self, group: GroupUnderWay) -> "_Room":
        """Reserve room for the next attempt. It waits for an update that is under way: until then the replica may
        have older weights than those that sampled the tokens of the group."""
        if group.losses >= LOSSES_BEFORE_ALONE:
            await self._alone.acquire()
            if group.losses >= LOSSES_BEFORE_ALONE:
                group.attempt = replace(group.attempt, alone=True)
            else:  # meanwhile another group was found to be the cause
                self._alone.release()
        async with self.updating:
            pass
        return _Room(self._router, await self._router.acquire(self.group_size), self.group_size)

    async def _attempt(self, group: GroupUnderWay, room: "_Room") -> TrajectoryGroup:
        """One try on one replica. An episode that ends gives its room there back at once, the others when it is over,
        however it ends."""
        prompt, attempt, replica = group.prompt, group.attempt, room.replica
        self._progress.begin(prompt.ordinal, attempt, replica)
        try:
            async with within(self.group_timeout_s, "rollout.group_timeout_s", f"prompt {prompt.ordinal} on {replica}"):
                done = await self.runner.run_group(
                    prompt, replica, self.sampling, self.group_size, attempt, on_open=room.keep
                )
                if self.teacher is None or done.is_aborted:
                    return done
                room.keep(0)
                return await self.teacher.score(done)
        finally:
            room.keep(0)
            if attempt.alone:
                self._alone.release()

    def _forget(self, ordinal: int) -> None:
        """No await comes between the buffer's taking the group and this, so a checkpoint finds it in one place only."""
        del self.under_way[ordinal]
        self._progress.end(ordinal)

    def _count_lost(self, partials: dict[InGroup, PartialCompletion], all_known: bool) -> None:
        known = {episode for (episode, _), partial in partials.items() if partial.completion.num_tokens}
        self.counters["moved"] += len(known)
        if not all_known:  # the others may have had tokens
            self.counters["restarted"] += max(0, self.group_size - len(known))
