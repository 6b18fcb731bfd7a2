"""The producing loop: prompts in, trajectory groups out, as fast as slots and replicas allow."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from configs.runtime.deadline import within
from rollout.buffer import TrajectoryBuffer
from rollout.failures import GroupBudget
from rollout.progress import Attempt, Progress, SoFar
from rollout.prompts import PromptStream
from rollout.router import AgentWorkerLostError, ReplicaLostError, ReplicaRouter
from rollout.staleness import Slot
from rollout.types import Prompt, SamplingParams, TrajectoryGroup

logger = logging.getLogger(__name__)
LOSSES_BEFORE_ALONE = 2
"""A group whose agent workers died so often runs in a process of its own."""
ALONE_AT_ONCE = 4


class GroupRunner(Protocol):
    """Runs the agent loop of a whole group on one replica, and its rewards, away from the driver."""

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> TrajectoryGroup:
        """Raises ReplicaLostError, and AgentWorkerLostError when the process died that ran the agent loop: of many
        groups, or, where the attempt says so, of this one alone."""
        ...


@dataclass(slots=True, kw_only=True)
class GroupUnderWay:
    """A prompt that has been dispatched, and whose group has not come yet."""

    slot: Slot
    prompt: Prompt
    attempt: Attempt = field(default_factory=Attempt)
    failures: int = 0
    losses: int = 0
    """How often an agent worker died that ran it, and maybe others, and maybe because of it."""


class Rollouter:
    """Every prompt that is dispatched becomes exactly one group in the buffer, or is counted as failed, or the run ends
    with the error. What was sampled before a replica was lost, or the run ended, is never sampled again."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        stream: PromptStream,
        buffer: TrajectoryBuffer,
        router: ReplicaRouter,
        runner: GroupRunner,
        sampling: SamplingParams,
        group_size: int,
        group_timeout_s: float,
        on_lost: Callable[[str, BaseException], Awaitable[bool]],
        progress: Progress | None = None,
        ask: Callable[[str], Awaitable[object]] | None = None,
        abandon: Callable[[str, Collection[str]], Awaitable[object]] | None = None,
        updated: Callable[[], Awaitable[object]] | None = None,
        failures: GroupBudget | None = None,
        paused_s: Callable[[str], float] = lambda replica: 0.0,
    ):
        """`on_lost`: told of every replica that was lost with a group; says whether all that it had sampled is known,
        and raises when too few are left. `progress`: filled by whoever asks the replicas; `ask(replica)`: do so now, as
        far as it answers. `abandon(replica, request_ids)`: end them there, nobody waits for them any more. `updated`:
        returns when no weight update is under way. `failures`: by default none is allowed. `paused_s(replica)`: for how
        many seconds, since ever, it was paused."""
        self._stream = stream
        self._buffer = buffer
        self._router = router
        self._runner = runner
        self._sampling = sampling
        self._group_size = group_size
        self._group_timeout_s = group_timeout_s
        self._on_lost = on_lost
        self._progress = progress or Progress()
        self._ask = ask
        self._abandon = abandon
        self._updated = updated
        self._failures = failures or GroupBudget()
        self._paused_s = paused_s
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)
        self.under_way: dict[int, GroupUnderWay] = {}
        """By ordinal. What is in here when the run starts, of another run, is dispatched first."""
        self.counters = {"trajectories_started": 0, "moved": 0, "restarted": 0}
        """Trajectories: those that went on elsewhere from the tokens they had are `moved`; `restarted` are those that
        were lost before anybody knew a token of theirs."""

    async def run(self) -> None:
        """Consumes free slots and room on replicas, produces groups, ends when the buffer needs no more."""
        async with asyncio.TaskGroup() as groups:
            for group in list(self.under_way.values()):
                replica = await self._router.acquire(self._group_size)
                groups.create_task(self._produce(group, replica), name=f"prompt-{group.prompt.ordinal}")
            while True:
                # Room first, slot second: a slot's staleness counts from its claim, so it must not wait for room.
                replica = await self._router.acquire(self._group_size)
                slot = None
                try:
                    slot = await self._buffer.claim()
                finally:
                    if slot is None:
                        await self._router.release(replica, self._group_size)
                if slot is None:
                    return
                if replica not in self._router.healthy:  # ejected by the update that freed the slot
                    await self._router.release(replica, self._group_size)
                    replica = await self._router.acquire(self._group_size)
                group = GroupUnderWay(slot=slot, prompt=self._stream.next())
                self.under_way[group.prompt.ordinal] = group
                self.counters["trajectories_started"] += self._group_size
                groups.create_task(self._produce(group, replica), name=f"prompt-{group.prompt.ordinal}")

    async def _produce(self, group: GroupUnderWay, replica: str) -> None:
        """A group that is lost or fails is tried again under the same slot, so that its staleness stays bound."""
        ordinal = group.prompt.ordinal
        while True:
            try:
                finished = await self._attempt(group, replica)
            except ReplicaLostError as error:
                told_all = await self._on_lost(replica, error)
                self._count_lost(self._progress.so_far(ordinal), told_all)
                self._begin_next(group)
            except Exception as error:
                is_failure = self._is_failure(group, error)
                await self._take_back(group, replica)
                if is_failure and self._failures.gives_up(ordinal, group.failures, error):
                    await self._buffer.fail(group.slot)
                    return self._forget(ordinal)
            else:
                await self._buffer.put(group.slot, finished)
                return self._forget(ordinal)
            replica = await self._room(group)

    def _is_failure(self, group: GroupUnderWay, error: Exception) -> bool:
        """An agent worker that dies takes all its groups with it, and one of them may be why. Those that lost workers
        twice run alone: the one that ends such a process too is why, and the others are not."""
        ordinal = group.prompt.ordinal
        if isinstance(error, AgentWorkerLostError):
            if not group.attempt.alone:
                group.losses += 1
                logger.warning("prompt %d goes on elsewhere: %s", ordinal, error)
                return False
            for other in self.under_way.values():
                if not other.attempt.alone:
                    other.losses = 0
        group.failures += 1
        logger.warning("prompt %d failed (%d)", ordinal, group.failures, exc_info=error)
        return True

    async def _take_back(self, group: GroupUnderWay, replica: str) -> None:
        """What the group has on a replica that lives goes into its next attempt. Nobody waits any more for what still
        runs there, so it would only take up seats."""
        if self._ask is not None:
            await self._ask(replica)
        running = self._progress.running(group.prompt.ordinal)
        self._begin_next(group)
        if self._abandon is not None and running:
            await self._abandon(replica, running)

    def _begin_next(self, group: GroupUnderWay) -> None:
        """From now on nothing is believed that is told of the attempt before: it may have been abandoned."""
        ordinal = group.prompt.ordinal
        group.attempt = Attempt(number=group.attempt.number + 1, so_far=self._progress.so_far(ordinal))
        self._progress.end(ordinal)

    async def _room(self, group: GroupUnderWay) -> str:
        """Where the next attempt runs. After an update: before, a replica may still sample with older weights than
        those that the group has tokens of already."""
        if group.losses >= LOSSES_BEFORE_ALONE:
            await self._alone.acquire()
            if group.losses >= LOSSES_BEFORE_ALONE:
                group.attempt = replace(group.attempt, alone=True)
            else:  # another one was why, as is known by now
                self._alone.release()
        if self._updated is not None:
            await self._updated()
        return await self._router.acquire(self._group_size)

    async def _attempt(self, group: GroupUnderWay, replica: str) -> TrajectoryGroup:
        prompt = group.prompt
        self._progress.begin(prompt.ordinal, group.attempt, replica)
        try:
            what = f"prompt {prompt.ordinal} on {replica}"
            paused_s = partial(self._paused_s, replica)
            async with within(self._group_timeout_s, "rollout.group_timeout_s", what, paused_s):
                return await self._runner.run_group(prompt, replica, self._sampling, self._group_size, group.attempt)
        finally:
            await self._router.release(replica, self._group_size)
            if group.attempt.alone:
                self._alone.release()

    def _forget(self, ordinal: int) -> None:
        """Nothing can come in between since the buffer took it, so a checkpoint finds it in one of the two places."""
        del self.under_way[ordinal]
        self._progress.end(ordinal)

    def _count_lost(self, so_far: dict[str, SoFar], told_all: bool) -> None:
        known = {name.partition("-")[0] for name, known in so_far.items() if len(known.completion.token_ids)}
        self.counters["moved"] += len(known)
        if not told_all:  # the others may have had tokens
            self.counters["restarted"] += max(0, self._group_size - len(known))
