"""The wiring of a run on simulated engines and a simulated trainer: everything between them is the real thing.

Buffer, slot ledger, router, rollouter, agent worker, replicas, fleet, evaluator, train loop and checkpoint manager are
those of a run. They only see the clock of the running event loop, which may be a virtual one.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from configs.runtime.tasks import run_with_background
from configs.schema import Config
from rollout.agents.loop import AgentLoop
from rollout.agents.worker import AgentWorker
from rollout.buffer import TrajectoryBuffer, make_buffer
from rollout.evaluation.evaluator import Evaluator
from rollout.evaluation.pinned import PinnedEvaluator
from rollout.events.driver import NO_EVENTS, DriverEvents
from rollout.events.log import EventLog
from rollout.failures import FailureBudget
from rollout.fleet.fleet import ReplicaFleet
from rollout.prompts import PromptStream
from rollout.replica.replica import RolloutReplica
from rollout.rewards.scoring import RewardScorer
from rollout.rollouter import Rollouter
from rollout.router import ReplicaRouter, max_inflight
from rollout.types import Prompt, SamplingParams
from scripts.bench.stand_ins import NO_REWARD, NoCheckpoints, Nothing, NoTokenizer
from trainer.loop import GroupSource, TrainLoop
from weight_sync.checkpoint_manager import CheckpointManager

NEVER_S = 1e9
AGENT_WORKER = "agent-worker-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What a run is made of that has neither models nor processes."""

    config: Config
    replicas: Sequence[RolloutReplica]
    """Their engines are simulated."""
    workers: Any
    """Stands for the trainer's own workers."""
    loop: AgentLoop
    scorer: RewardScorer = NO_REWARD
    recorder: Any = field(default_factory=Nothing)
    checkpointer: Any = field(default_factory=NoCheckpoints)
    held_out: Sequence[Prompt] = ()
    """Asked as `trainer.eval_every` says, on pinned replicas as in a run."""
    events: DriverEvents = NO_EVENTS
    of_agents: EventLog = field(default_factory=lambda: EventLog(is_on=False))
    """Of the agent worker."""
    collect_s: float = 1.0
    """How often the replicas are asked for their progress."""
    as_source: Callable[[TrajectoryBuffer], GroupSource] = lambda buffer: buffer
    """What the train loop sees of the buffer."""

    async def train(self) -> float:
        """Take all steps. Returns the seconds, from when the replicas serve the first weights."""
        config, clock = self.config, asyncio.get_running_loop().time
        size = config.algorithm.group_size
        buffer = make_buffer(config)
        buffer.emit = self.events.emit
        names = [replica.name for replica in self.replicas]
        limit = max_inflight(config.rollout.max_num_seqs, size, config.rollout.episodes_per_seat)
        router = ReplicaRouter(names, limit)
        members: list[Any] = list(self.replicas)
        fleet = ReplicaFleet(members, router, min_replicas=1, report=[].append, events=self.events)
        manager = CheckpointManager(self.workers, fleet, config.weight_sync)
        agents = AgentWorker(
            config=config,
            tokenizer=NoTokenizer(),
            loop=self.loop,
            scorer=self.scorer,
            events=self.of_agents,
            replicas={replica.name: replica.generate_group for replica in self.replicas},
        )
        rollouter = Rollouter(
            stream=PromptStream([Prompt(ordinal=0, text="", token_ids=(1, 2), ground_truth="")], seed=0),
            buffer=buffer,
            fleet=fleet,
            runner=agents,
            updating=manager.updating,
            sampling=SamplingParams(),
            group_size=size,
            group_timeout_s=config.rollout.group_timeout_s,
            emit=self.events.emit,
        )
        nothing: Any = Nothing()
        loop = TrainLoop(
            config=config,
            buffer=self.as_source(buffer),
            workers=self.workers,
            manager=manager,
            held_out=self._evaluator(agents, fleet, manager),
            fleet=nothing,
            recorder=self.recorder,
            checkpointer=self.checkpointer,
            emit=self.events.emit,
        )

        async def collect() -> None:
            """As the fleet's monitor and the agent workers' group do."""
            while True:
                await asyncio.sleep(self.collect_s)
                await self._collect(fleet)

        await manager.update_weights(0)
        started = clock()
        await run_with_background(loop.run(), background=[rollouter.run(), collect()])
        seconds = clock() - started
        await self._collect(fleet)
        return seconds

    async def _collect(self, fleet: ReplicaFleet) -> None:
        await fleet.collect_progress()
        self.events.take(AGENT_WORKER, self.of_agents.take(), asyncio.get_running_loop().time())

    def _evaluator(self, agents: AgentWorker, fleet: ReplicaFleet, manager: CheckpointManager) -> Any:
        if not self.held_out:
            return Nothing()
        evaluation = self.config.evaluation
        evaluator = Evaluator(
            prompts=self.held_out,
            router=fleet.router,
            runner=agents,
            sampling=SamplingParams(),
            num_samples=evaluation.samples,
            timeout_s=evaluation.timeout_s,
            failures=FailureBudget(),
            on_lost=fleet.lose,
        )
        return PinnedEvaluator(
            evaluator=evaluator,
            fleet=fleet,
            updating=manager.updating,
            catch_up=manager.catch_up,
            num_replicas=evaluation.replicas,
            report=[].append,
        )


def without_deadlines(config: Config) -> Config:
    """The config with deadlines that no virtual clock reaches."""
    sync = replace(
        config.weight_sync,
        stage_timeout_s=NEVER_S,
        pause_timeout_s=NEVER_S,
        swap_timeout_s=NEVER_S,
    )
    return replace(
        config,
        weight_sync=sync,
        rollout=replace(config.rollout, group_timeout_s=NEVER_S),
        evaluation=replace(config.evaluation, timeout_s=NEVER_S),
        trainer=replace(config.trainer, batch_timeout_s=NEVER_S),
    )
