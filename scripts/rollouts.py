"""What produces the groups of a run."""

from collections.abc import Sequence

from configs.schema import Config
from rollout.buffer import make_buffer
from rollout.fleet import ReplicaFleet
from rollout.progress import Progress
from rollout.prompts import EncodedRow, PromptStream
from rollout.rewards.budget import failure_budget, group_budget
from rollout.rollout_state import Rollouts
from rollout.rollouter import GroupRunner, Rollouter
from rollout.router import ReplicaRouter
from rollout.types import SamplingParams


def make_rollouts(  # noqa: PLR0913
    config: Config,
    rows: Sequence[EncodedRow],
    runner: GroupRunner,
    router: ReplicaRouter,
    fleet: ReplicaFleet,
    progress: Progress,
    global_steps: int,
) -> Rollouts:
    """Of a run that has taken so many steps. `progress`: the fleet's."""
    failed_rewards, failed_groups = failure_budget(config), group_budget(config)
    stream = PromptStream(rows, config.seed)
    buffer = make_buffer(config, failed_rewards, failed_groups, global_steps)
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
        failures=failed_groups,
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
