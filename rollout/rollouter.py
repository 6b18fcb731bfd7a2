"""The producing loop: prompts in, trajectory groups out, as fast as slots and replicas allow."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from configs.deadline import within
from rollout.buffer import TrajectoryBuffer
from rollout.prompts import PromptStream
from rollout.router import ReplicaLostError, ReplicaRouter
from rollout.staleness import Slot
from rollout.types import Prompt, SamplingParams, TrajectoryGroup


class GroupRunner(Protocol):
    """Runs the agent loop of a whole group on one replica, and its rewards, away from the driver."""

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int
    ) -> TrajectoryGroup: ...


class Rollouter:
    """Every prompt that is dispatched becomes exactly one group in the buffer, or the run ends with the error."""

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
        on_lost: Callable[[str, BaseException], Awaitable[None]],
    ):
        """`on_lost`: told of every replica that was lost with a group; raises when too few are left."""
        self._stream = stream
        self._buffer = buffer
        self._router = router
        self._runner = runner
        self._sampling = sampling
        self._group_size = group_size
        self._group_timeout_s = group_timeout_s
        self._on_lost = on_lost
        self.trajectories_started = 0
        self.restarted_groups = 0

    async def run(self) -> None:
        """Consumes free slots and room on replicas, produces groups, ends when the buffer needs no more."""
        async with asyncio.TaskGroup() as groups:
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
                prompt = self._stream.next()
                self.trajectories_started += self._group_size
                groups.create_task(self._produce(slot, prompt, replica), name=f"prompt-{prompt.ordinal}")

    async def _produce(self, slot: Slot, prompt: Prompt, replica: str) -> None:
        """A group whose replica is lost starts again on another one, under the same slot: its staleness stays bound."""
        while True:
            what = f"prompt {prompt.ordinal} on {replica}"
            try:
                async with within(self._group_timeout_s, "rollout.group_timeout_s", what):
                    group = await self._runner.run_group(prompt, replica, self._sampling, self._group_size)
                break
            except ReplicaLostError as error:
                await self._on_lost(replica, error)
            finally:
                await self._router.release(replica, self._group_size)
            self.restarted_groups += 1
            replica = await self._router.acquire(self._group_size)
        await self._buffer.put(slot, group)
