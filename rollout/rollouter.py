"""The producing loop: prompts in, trajectory groups out, as fast as slots and replicas allow."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from configs.runtime.deadline import within
from rollout.buffer import TrajectoryBuffer
from rollout.errors import AgentWorkerLostError, EpisodesLostError, NoReplicaLeftError, TooFewReplicasError
from rollout.events.event import Emit, nobody
from rollout.events.kinds import GroupClaimed, GroupMoved
from rollout.fleet.fleet import ReplicaFleet
from rollout.mixture import PromptMixture, SourceTerms
from rollout.progress import Attempt, EpisodesOpen, GroupMessage, GroupProgress, Move, ReplicaLost
from rollout.prompts import PromptStream
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

    def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> AsyncGenerator[GroupMessage, Move | None]:
        """Run the agent loops of a group, and its rewards, in one call that lasts until the group is complete.

        Yields:
            EpisodesOpen: whenever episodes have ended.
            ReplicaLost: the episodes wait. A `Move` must be sent in answer.
            TrajectoryGroup: the group, at last.

        Closing the generator ends the episodes. Raises AgentWorkerLostError.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class GroupUnderWay(GroupProgress):
    """A prompt that has a slot and is not complete: the driver's one record of it."""

    slot: Slot
    prompt: Prompt
    held: int = 0
    """Trajectories for which it holds room on its replica. Each that ends gives its room back."""
    alone: bool = False
    """True while it runs in a process of its own."""
    failures: int = 0
    losses: int = 0
    """Agent workers that died while they ran it, together with other groups: it may or may not be the cause."""

    @property
    def source(self) -> str:
        """The source of its prompt in data.sources, or nothing."""
        return self.prompt.source

    @property
    def attempt(self) -> Attempt:
        return Attempt(number=self.number, partials=self.partials(), alone=self.alone)


@dataclass(kw_only=True)
class Rollouter:
    """Turns every dispatched prompt into exactly one group in the buffer, or counts it as failed, or ends the run with
    the error. Tokens sampled before a replica was lost, or a run ended, are never sampled again.

    Example of the events of one prompt:
        buffer.turn -> router.acquire -> buffer.claim -> stream.next -> runner.run_group, which yields ReplicaLost
        -> fleet.lose -> router.acquire
        -> Move into the open call: attempt 1 begins with the tokens that attempt 0 had sampled
        -> the call yields the group -> teacher.score, if there is a teacher -> buffer.put
    """

    stream: PromptStream | PromptMixture
    buffer: TrajectoryBuffer
    fleet: ReplicaFleet
    runner: GroupRunner
    updating: asyncio.Lock
    """The checkpoint manager holds it while replicas change version."""
    sampling: SamplingParams
    group_size: int
    group_timeout_s: float
    """Bounds each attempt at a group, and the wait of its episodes for another replica."""
    teacher: Teacher | None = None
    """Scores every group before the buffer gets it."""
    emit: Emit = nobody
    replayable: bool = True
    """True where episodes that run again from their beginning hear what was sampled for them before. With false they
    get new answers, and only episodes that wait for another replica go on from their tokens."""
    sources: Mapping[str, SourceTerms] = field(default_factory=dict)
    """The terms of each source of data.sources, in place of `sampling`, `group_size` and `replayable`."""
    counters: dict[str, int] = field(init=False)
    """Trajectories. `moved` continued elsewhere from the tokens they had; `restarted` were lost before any token of
    theirs was known."""

    def __post_init__(self) -> None:
        self.counters = {"trajectories_started": 0, "moved": 0, "restarted": 0}
        self._router, self._progress = self.fleet.router, self.fleet.progress
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)
        alone = SourceTerms(sampling=self.sampling, group_size=self.group_size, replayable=self.replayable)
        self._terms = dict(self.sources) or {"": alone}

    def size_of(self, source: str) -> int:
        """Return the group size of a source."""
        return self._terms[source].group_size

    @property
    def under_way(self) -> dict[int, GroupUnderWay]:
        """Return the groups under way by ordinal, in the order of their dispatch."""
        groups = self._progress.groups.items()
        return {ordinal: group for ordinal, group in groups if isinstance(group, GroupUnderWay)}

    def register(self, group: GroupUnderWay) -> None:
        """Add a group to those under way. The groups of a resumed run are added before it starts, and dispatched
        first."""
        self._progress.groups[group.ordinal] = group

    async def run(self) -> None:
        """Consume free slots and room on replicas, produce groups, return when the buffer needs no more."""
        async with asyncio.TaskGroup() as groups:
            for group in self.under_way.values():
                self._begin_anew(group)
                self._start(groups, group, await self._router.acquire(self.size_of(group.source)))
            # Nobody else claims: a source whose turn it is may claim a slot whenever there is room for its group.
            while (source := await self.buffer.turn()) is not None:
                size = self.size_of(source)
                # Room first, slot second: a slot's staleness counts from its claim, so it must not wait for room.
                replica = await self._router.acquire(size)
                slot = None
                try:
                    slot = await self.buffer.claim(source)
                finally:
                    if slot is None:
                        self._router.release(replica, size)
                if slot is None:
                    return
                if replica not in self._router.healthy:  # ejected by the update that freed the slot
                    self._router.release(replica, size)
                    replica = await self._router.acquire(size)
                prompt = self.stream.next(source)
                group = GroupUnderWay(ordinal=prompt.ordinal, slot=slot, prompt=prompt)
                self.register(group)
                self.counters["trajectories_started"] += size
                self.emit(GroupClaimed(ordinal=prompt.ordinal, replica=replica))
                self._start(groups, group, replica)

    def _start(self, groups: asyncio.TaskGroup, group: GroupUnderWay, replica: str) -> None:
        self._place(group, replica)
        task = groups.create_task(self._produce(group))
        task.add_done_callback(lambda _: self._keep_room(group, 0))  # also if the run ends before its first step

    def left_over(self) -> list[DiscardedGroup]:
        """Return the groups that were begun and are not needed, because the run was resumed with fewer steps."""
        ready = {group.prompt.ordinal: group for group in self.buffer.ready}
        prompts = {ordinal: self.stream.at(ordinal) for ordinal in self.stream.returned}
        prompts |= {ordinal: group.prompt for ordinal, group in {**ready, **self.under_way}.items()}
        return [
            DiscardedGroup(
                prompt=prompts[ordinal],
                reason=DiscardReason.unneeded,
                trajectories=ready[ordinal].trajectories if ordinal in ready else (),
            )
            for ordinal in sorted(prompts)
        ]

    async def _produce(self, group: GroupUnderWay) -> None:
        """Run the group until it is complete or given up, always under the same slot."""
        while True:
            try:
                finished = await self._run(group)
            except (TooFewReplicasError, NoReplicaLeftError):  # no other call would have a replica
                raise
            except EpisodesLostError as error:
                logger.warning("prompt %d begins anew: %s", group.ordinal, error)
                self._begin_anew(group)
                self._tell_moved(group, error)
            except Exception as error:
                is_failure = self._is_failure(group, error)
                await self._take_back(group)
                failures = self.buffer.failures
                if is_failure and failures.gives_up(group.ordinal, group.failures, error, group.source):
                    await self.buffer.fail(group.slot, group.prompt, error)
                    return self._end(group, [])
                self._tell_moved(group, error)
            else:
                await self.buffer.put(group.slot, finished)
                # No await stands between the buffer's taking the group and this: a checkpoint finds it in one place.
                return self._end(group, finished.rewards)
            await self._isolate(group)
            await self._take_room(group)

    def _end(self, group: GroupUnderWay, rewards: list[float]) -> None:
        self.stream.tell(group.prompt, rewards)
        self._progress.end(group.ordinal)

    async def _run(self, group: GroupUnderWay) -> TrajectoryGroup:
        """Run the group in one call to an agent worker, on one replica after another. An episode that ends gives its
        room there back at once, the others when the attempt is over, however it ends."""
        assert group.replica is not None
        terms = self._terms[group.source]
        try:
            async with aclosing(
                self.runner.run_group(group.prompt, group.replica, terms.sampling, terms.group_size, group.attempt)
            ) as messages:
                move: Move | None = None
                while True:
                    where = f"prompt {group.ordinal} on {group.replica}"
                    async with within(self.group_timeout_s, "rollout.group_timeout_s", where):
                        message = await messages.asend(move)
                        while isinstance(message, EpisodesOpen):
                            self._keep_room(group, message.count)
                            message = await anext(messages)
                        if not isinstance(message, ReplicaLost):
                            return await self._scored_by_teacher(group, message)
                    move = await self._move(group, message.error)
        finally:
            self._keep_room(group, 0)
            if group.alone:
                self._alone.release()

    async def _scored_by_teacher(self, group: GroupUnderWay, finished: TrajectoryGroup) -> TrajectoryGroup:
        if self.teacher is None or finished.is_aborted:
            return finished
        self._keep_room(group, 0)
        return await self.teacher.score(finished)

    async def _move(self, group: GroupUnderWay, error: Exception) -> Move:
        """Find another replica for the episodes of a group, which wait for it in their agent worker. Raises
        EpisodesLostError when none comes within rollout.group_timeout_s."""
        assert group.replica is not None
        self._keep_room(group, 0)
        all_known = await self.fleet.lose(group.replica, error)
        self._count_lost(group, all_known)
        group.end_attempt()
        self._tell_moved(group, error)
        try:
            async with within(self.group_timeout_s, "rollout.group_timeout_s", "waiting for another replica"):
                return Move(await self._take_room(group), group.attempt)
        except TimeoutError as late:
            raise EpisodesLostError(str(late)) from error

    def _tell_moved(self, group: GroupUnderWay, error: Exception) -> None:
        self.emit(GroupMoved(ordinal=group.ordinal, attempt=group.number, why=f"{type(error).__name__}: {error}"))

    def _is_failure(self, group: GroupUnderWay, error: Exception) -> bool:
        """Return whether the error counts against the group. Of the groups that an agent worker takes with it at most
        one is the cause: the one whose own process dies too, when it runs alone, and the others are cleared."""
        was_alone, group.alone = group.alone, False
        if isinstance(error, AgentWorkerLostError):
            if not was_alone:
                group.losses += 1
                logger.warning("prompt %d continues elsewhere: %s", group.ordinal, error)
                return False
            for other in self.under_way.values():
                if other is not group and not other.alone:
                    other.losses = 0
        group.failures += 1
        logger.warning("prompt %d failed (%d)", group.ordinal, group.failures, exc_info=error)
        return True

    async def _take_back(self, group: GroupUnderWay) -> None:
        """Take what the group has sampled on a replica that lives into its next attempt, and end its requests there."""
        assert group.replica is not None
        replica = group.replica
        await self.fleet.collect_progress(replica)
        running = group.running()
        group.end_attempt()  # before the abort, so that its end is not taken for the end of a response
        self._begin_anew(group)
        if running:
            await self.fleet.abort(replica, running)

    def _begin_anew(self, group: GroupUnderWay) -> None:
        """Restart the episodes in the next call. If replay is allowed, they receive the recorded completions again."""
        if not self._terms[group.source].replayable:
            group.records.clear()

    async def _isolate(self, group: GroupUnderWay) -> None:
        """Let the group run alone next if it may be the cause of deaths, once few others do."""
        group.alone = False
        if group.losses >= LOSSES_BEFORE_ALONE:
            await self._alone.acquire()
            group.alone = group.losses >= LOSSES_BEFORE_ALONE
            if not group.alone:  # meanwhile another group was found to be the cause
                self._alone.release()

    async def _take_room(self, group: GroupUnderWay) -> str:
        """Reserve room for the next attempt, and return its replica. An update that is under way is waited for: until
        then the replica may have older weights than those that sampled the tokens of the group."""
        async with self.updating:
            pass
        replica = await self._router.acquire(self.size_of(group.source))
        self._place(group, replica)
        return replica

    def _place(self, group: GroupUnderWay, replica: str) -> None:
        self._progress.place(group, replica)
        group.held = self.size_of(group.source)

    def _keep_room(self, group: GroupUnderWay, num_open: int) -> None:
        """Give back the room that more than `num_open` episodes have."""
        if num_open < group.held:
            assert group.replica is not None
            self._router.release(group.replica, group.held - num_open)
            group.held = num_open

    def _count_lost(self, group: GroupUnderWay, all_known: bool) -> None:
        known = {episode for (episode, _), partial in group.partials().items() if partial.completion.num_tokens}
        self.counters["moved"] += len(known)
        if not all_known:  # the others may have had tokens
            self.counters["restarted"] += max(0, self.size_of(group.source) - len(known))
