"""The rollouter's groups on a fleet of replicas."""

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

from configs.runtime.deadline import within
from rollout.fleet.fleet import ReplicaFleet
from rollout.progress import Attempt
from rollout.request_ids import RequestId
from rollout.types import Prompt, SamplingParams, TrajectoryGroup

logger = logging.getLogger(__name__)


class GroupRunner(Protocol):
    """The agent workers."""

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> TrajectoryGroup: ...


class FleetEpisodes:
    """`rollout.rollouter.Episodes` over the agent workers and the fleet of a run."""

    def __init__(self, runner: GroupRunner, fleet: ReplicaFleet, publishing: asyncio.Lock):
        """`publishing`: the checkpoint manager holds it while replicas change version."""
        self._runner = runner
        self._fleet = fleet
        self._publishing = publishing
        self.progress = fleet.progress

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> TrajectoryGroup:
        return await self._runner.run_group(prompt, replica, sampling, group_size, attempt)

    async def replica_lost(self, name: str, error: BaseException) -> bool:
        return await self._fleet.lose(name, error)

    async def collect_progress(self, name: str) -> None:
        await self._fleet.collect_progress(name)

    async def abort(self, name: str, request_ids: Collection[RequestId]) -> None:
        for replica in (replica for replica in self._fleet.running if replica.name == name):
            try:
                async with within(self._fleet.answer_timeout_s, "rollout.answer_timeout_s", f"abort on {name}"):
                    await replica.abort([str(request_id) for request_id in request_ids])
            except Exception as error:  # whether the replica is lost is for the monitor to decide
                logger.info("%s may still run %d requests: %r", name, len(request_ids), error)

    async def updated(self) -> None:
        async with self._publishing:
            pass
