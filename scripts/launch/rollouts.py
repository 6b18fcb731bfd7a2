"""What produces the groups of a run."""

import asyncio
from collections.abc import Sequence

from configs.schema import Config
from rollout.buffer import make_buffer
from rollout.failures import failure_budget, group_budget
from rollout.fleet.episodes import FleetEpisodes, GroupRunner
from rollout.fleet.fleet import ReplicaFleet
from rollout.prompts import EncodedRow, PromptStream
from rollout.rollouter import Rollouter
from rollout.snapshot import Rollouts
from rollout.types import SamplingParams


def make_rollouts(
    config: Config,
    rows: Sequence[EncodedRow],
    runner: GroupRunner,
    fleet: ReplicaFleet,
    global_steps: int,
    publishing: asyncio.Lock,
) -> Rollouts:
    """Of a run that has taken so many steps. `publishing`: held while replicas change version."""
    failed_rewards, failed_groups = failure_budget(config), group_budget(config)
    stream = PromptStream(rows, config.seed)
    buffer = make_buffer(config, failed_rewards, failed_groups, global_steps)
    rollouter = Rollouter(
        stream=stream,
        buffer=buffer,
        router=fleet.router,
        episodes=FleetEpisodes(runner, fleet, publishing),
        sampling=training_sampling(config),
        group_size=config.algorithm.group_size,
        group_timeout_s=config.rollout.group_timeout_s,
        failures=failed_groups,
    )
    return Rollouts(
        stream=stream,
        buffer=buffer,
        rollouter=rollouter,
        failed_rewards=failed_rewards,
        failed_groups=failed_groups,
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
