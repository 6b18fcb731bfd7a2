"""One group on simulated engines, wired as in a run: rollouter, fleet, agent worker and replicas are the real ones."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from configs.rollout import SessionsConfig
from configs.schema import AlgorithmConfig, Config, RolloutConfig, TrainerConfig, WeightSyncConfig
from rollout.agents.loop import AgentLoop
from rollout.agents.worker import AgentWorker
from rollout.engines.base import EngineDiedError
from rollout.errors import AgentWorkerLostError, ReplicaLostError
from rollout.progress import GroupMessage, Move
from rollout.replica.replica import RolloutReplica
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams, TrajectoryGroup
from scripts.launch.driver import make_fleet, make_rollouter
from tests.support.fakes import ClockedEngine, make_replica, now
from tests.support.stand_ins import NO_REWARD, FixedTimeTrainer, NoTokenizer, TenTokens
from weight_sync.checkpoint_manager import CheckpointManager

GROUP_SIZE = 4


class Scene:
    """One group of four responses of ten tokens, a token per second, on engines with two seats each."""

    def __init__(
        self,
        num_replicas: int,
        loop: AgentLoop | None = None,
        replayable: bool = True,
        make_engine: Callable[[int], ClockedEngine] = lambda index: ClockedEngine(max_num_seqs=2),
    ):
        config = Config(
            algorithm=AlgorithmConfig(group_size=GROUP_SIZE),
            rollout=RolloutConfig(
                num_replicas=num_replicas,
                max_num_seqs=2,
                min_replicas=1,
                agent=None if replayable else "my_agent:agent",
            ),
            sessions=SessionsConfig(replayable=replayable),
            trainer=TrainerConfig(total_steps=1, prompts_per_step=1),
            weight_sync=WeightSyncConfig(stage_timeout_s=100.0),
        )
        self.engines = [make_engine(index) for index in range(num_replicas)]
        self.replicas = [make_replica(f"replica-{index}", engine) for index, engine in enumerate(self.engines)]
        self.fleet, _ = make_fleet(config, self.replicas, [].append)
        self.workers = FixedTimeTrainer(1.0)
        self.manager = CheckpointManager(self.workers, self.fleet, config.weight_sync)
        self.lost_at: float | None = None
        """The time at which the agent worker dies, once. Its requests on the replica go on, as Ray lets them."""
        self.worker = AgentWorker(
            config=config,
            tokenizer=NoTokenizer(),
            loop=loop or TenTokens(),
            scorer=NO_REWARD,
            replicas={replica.name: _generate_on(replica) for replica in self.replicas},
        )
        self._calls: list[Any] = []
        rows = [Prompt(ordinal=0, text="", token_ids=(1, 2), ground_truth="")]
        self.rollouter = make_rollouter(
            config, rows=rows, runner=self, fleet=self.fleet, global_steps=0, updating=self.manager.updating
        )

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Any
    ) -> AsyncGenerator[GroupMessage, Move | None]:
        messages = self.worker.run_group(prompt, replica, sampling, group_size, attempt)
        self._calls.append(messages)  # as in Ray, a call that the driver has lost goes on
        move = None
        while True:
            coming = asyncio.ensure_future(messages.asend(move))
            lost_in = None if self.lost_at is None else max(0, self.lost_at - now())
            if not (await asyncio.wait({coming}, timeout=lost_in))[0]:
                if move is not None:
                    coming.cancel()  # it died before the move came
                self.lost_at = None
                raise AgentWorkerLostError("an agent worker died")
            move = yield (message := coming.result())
            if isinstance(message, TrajectoryGroup):
                return

    @property
    def in_flight(self) -> float:
        """Trajectories that have room on a replica."""
        return self.fleet.router.gauges()["rollout/inflight_trajectories"]

    async def start(self) -> asyncio.Task[None]:
        await self.manager.update_weights(0)
        return asyncio.create_task(self.rollouter.run())

    async def group(self) -> TrajectoryGroup:
        (group,) = (await self.rollouter.buffer.next_batch(0)).groups
        return group


def _generate_on(replica: RolloutReplica) -> Any:
    async def generate(requests: list[GenerationRequest]) -> list[Completion]:
        try:
            return await replica.generate_group(requests)
        except EngineDiedError as error:
            raise ReplicaLostError(f"{replica.name} died") from error

    return generate
