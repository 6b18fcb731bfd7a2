"""One group on simulated engines, wired as in a run: rollouter, fleet, agent worker and replicas are the real ones."""

import asyncio
from typing import Any

from configs.rollout import SessionsConfig
from configs.schema import AlgorithmConfig, Config, RolloutConfig, TrainerConfig, WeightSyncConfig
from rollout.agents.loop import AgentLoop
from rollout.agents.worker import AgentWorker
from rollout.engines.base import EngineDiedError
from rollout.errors import AgentWorkerLostError, ReplicaLostError
from rollout.replica.replica import RolloutReplica
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams, TrajectoryGroup
from scripts.bench.common import ForcedLengths
from scripts.bench.stand_ins import NO_REWARD, NoTokenizer, SimulatedTrainer
from scripts.launch.driver import make_fleet, make_rollouter
from tests.support.fakes import ClockedEngine, make_replica, now
from weight_sync.checkpoint_manager import CheckpointManager

GROUP_SIZE = 4


class Scene:
    """One group of four responses of ten tokens, a token per second, on engines with two seats each."""

    def __init__(self, num_replicas: int, loop: AgentLoop | None = None, replayable: bool = True):
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
        self.engines = [ClockedEngine(max_num_seqs=2) for _ in range(num_replicas)]
        self.replicas = [make_replica(f"replica-{index}", engine) for index, engine in enumerate(self.engines)]
        self.fleet, _ = make_fleet(config, self.replicas, [].append)
        self.workers = SimulatedTrainer(1.0)
        self.manager = CheckpointManager(self.workers, self.fleet, config.weight_sync)
        self.lost_at: float | None = None
        """When the agent worker dies, the first time. What it runs on the replica goes on, as Ray lets it."""
        self.worker = AgentWorker(
            config=config,
            tokenizer=NoTokenizer(),
            loop=loop or ForcedLengths({"": lambda ordinal, index: 10}),
            scorer=NO_REWARD,
            replicas={replica.name: _generate_on(replica) for replica in self.replicas},
        )
        self._left_behind: list[asyncio.Task[Any]] = []
        rows = [Prompt(ordinal=0, text="", token_ids=(1, 2), ground_truth="")]
        self.rollouter = make_rollouter(
            config, rows=rows, runner=self, fleet=self.fleet, global_steps=0, updating=self.manager.updating
        )

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Any, *, on_open: Any
    ) -> TrajectoryGroup:
        running = asyncio.create_task(
            self.worker.run_group(prompt, replica, sampling, group_size, attempt, on_open=on_open)
        )
        if self.lost_at is None or attempt.number > 0:
            return await running
        self._left_behind.append(running)
        await asyncio.sleep(self.lost_at - now())
        raise AgentWorkerLostError("an agent worker died")

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
