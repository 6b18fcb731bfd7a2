"""What produces the groups of a run."""

import asyncio
import logging
from collections.abc import Collection, Sequence

from configs.schema import Config
from rollout.buffer import make_buffer
from rollout.failures import failure_budget, group_budget
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.members import LAST_PROGRESS_S
from rollout.progress import Progress
from rollout.prompts import EncodedRow, PromptStream
from rollout.rollouter import GroupRunner, Rollouter
from rollout.router import ReplicaRouter
from rollout.snapshot import Rollouts
from rollout.types import SamplingParams

logger = logging.getLogger(__name__)


def make_rollouts(  # noqa: PLR0913
    config: Config,
    rows: Sequence[EncodedRow],
    runner: GroupRunner,
    router: ReplicaRouter,
    fleet: ReplicaFleet,
    progress: Progress,
    global_steps: int,
    publishing: asyncio.Lock,
) -> Rollouts:
    """Of a run that has taken so many steps. `progress`: the fleet's. `publishing`: held while weights change."""

    async def abandon(name: str, request_ids: Collection[str]) -> None:
        for replica in (replica for replica in fleet.running if replica.name == name):
            try:
                async with asyncio.timeout(LAST_PROGRESS_S):
                    await replica.abort(request_ids)
            except Exception as error:  # who does not answer is the monitor's to judge
                logger.info("%s may still run %d requests: %r", name, len(request_ids), error)

    async def updated() -> None:
        async with publishing:
            pass

    failed_rewards, failed_groups = failure_budget(config), group_budget(config)
    stream = PromptStream(rows, config.seed)
    buffer = make_buffer(config, failed_rewards, failed_groups, global_steps, fleet.paused.of_any)
    rollouter = Rollouter(
        stream=stream,
        buffer=buffer,
        router=router,
        runner=runner,
        sampling=training_sampling(config),
        group_size=config.algorithm.group_size,
        group_timeout_s=config.rollout.group_timeout_s,
        on_lost=fleet.lose,
        progress=progress,
        ask=fleet.ask,
        abandon=abandon,
        updated=updated,
        failures=failed_groups,
        paused_s=fleet.paused.of,
    )
    return Rollouts(
        stream=stream,
        buffer=buffer,
        rollouter=rollouter,
        progress=progress,
        failed_rewards=failed_rewards,
        failed_groups=failed_groups,
        group_size=config.algorithm.group_size,
    )


def training_sampling(config: Config) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_response_tokens,
        seed=config.seed if rollout.seeded_sampling else None,
    )
