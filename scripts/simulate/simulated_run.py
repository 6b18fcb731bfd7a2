"""The wiring of a run on simulated engines and a simulated trainer: everything between them is the real thing.

Buffer, slot ledger, router, rollouter, agent worker, replicas, fleet, evaluator, train loop and checkpoint manager are
those of a run. They only see the clock of the running event loop, which may be a virtual one.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from configs.schema import Config
from rollout.actors.tasks import run_with_background
from rollout.agents.loop import AgentLoop
from rollout.agents.worker import AgentWorker
from rollout.buffer import TrajectoryBuffer
from rollout.engines.base import Engine
from rollout.evaluation.pinned import PinnedEvaluator
from rollout.events.driver import NO_EVENTS, DriverEvents, Write
from rollout.events.log import EventLog
from rollout.failures import FailureBudget
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.lifecycle import FleetMember
from rollout.replica.replica import RolloutReplica
from rollout.rewards.scoring import RewardScorer
from rollout.rollouter import GroupRunner
from rollout.router import max_inflight
from rollout.types import Prompt
from scripts.launch.driver import make_evaluator, make_rollouter
from scripts.simulate.stand_ins import NO_REWARD, NoCheckpoints, Nothing, NoTokenizer
from trainer.loop import TrainLoop
from trainer.ports import Evaluate, GroupSource
from weight_sync.checkpoint_manager import CheckpointManager

NEVER_S = 1e9
AGENT_WORKER = "agent-worker-0"


@dataclass(frozen=True, slots=True)
class Driver:
    """The parts of the driver that what runs beside them may need."""

    fleet: ReplicaFleet
    manager: CheckpointManager
    buffer: TrajectoryBuffer
    agents: AgentWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The parts of a run that has neither models nor processes."""

    config: Config
    engines: Sequence[Engine]
    """The simulated engines, a replica each."""
    workers: Any
    """Stands for the trainer's own workers."""
    loop: AgentLoop
    scorer: RewardScorer = NO_REWARD
    recorder: Any = field(default_factory=Nothing)
    checkpointer: Any = field(default_factory=NoCheckpoints)
    held_out: Sequence[Prompt] = ()
    """Asked as `trainer.eval_every` says, on pinned replicas as in a run."""
    write: Write | None = None
    """Takes the events."""
    collect_s: float = 60.0
    """The seconds after which the replicas are asked for their progress again; one where there are events."""
    as_member: Callable[[RolloutReplica], FleetMember] = lambda replica: replica
    """Returns a replica as the driver and the agent worker call it."""
    as_runner: Callable[[GroupRunner], GroupRunner] = lambda agents: agents
    """Returns the runner of groups that the rollouter calls, given the agent worker."""
    beside: Callable[[Driver], Sequence[Coroutine[Any, Any, None]]] = lambda driver: ()
    """Returns what else runs on the driver."""
    as_source: Callable[[TrajectoryBuffer], GroupSource] = lambda buffer: buffer
    """Returns the source of groups for the train loop, given the buffer."""

    async def train(self) -> float:
        """Take all steps. Returns the seconds, from when the replicas serve the first weights."""
        config, clock = self.config, asyncio.get_running_loop().time
        events = NO_EVENTS if self.write is None else DriverEvents(self.write, clock)
        agent_events = EventLog(clock, is_on=events.is_on)
        rollout, size = config.rollout, config.algorithm.group_size
        limit = max_inflight(rollout.max_num_seqs, size, rollout.episodes_per_seat)
        members: list[Any] = [
            self.as_member(
                RolloutReplica(
                    f"replica-{index}", engine, config.weight_sync, events=EventLog(clock, is_on=events.is_on)
                )
            )
            for index, engine in enumerate(self.engines)
        ]
        fleet = ReplicaFleet(members, limit, min_replicas=1, report=[].append, events=events)
        manager = CheckpointManager(self.workers, fleet, config.weight_sync)
        agents = AgentWorker(
            config=config,
            tokenizer=NoTokenizer(),
            loop=self.loop,
            scorer=self.scorer,
            events=agent_events,
            replicas={member.name: member.generate_group for member in members},
        )
        rollouter = make_rollouter(
            config,
            rows=[Prompt(ordinal=0, text="", token_ids=(1, 2), ground_truth="")],
            runner=self.as_runner(agents),
            fleet=fleet,
            global_steps=0,
            updating=manager.updating,
            emit=events.emit,
        )
        buffer = rollouter.buffer
        buffer.on_discard = self.recorder.record_discarded
        loop = TrainLoop(
            config=config,
            buffer=self.as_source(buffer),
            workers=self.workers,
            manager=manager,
            evaluate=self._evaluate(agents, fleet, manager),
            fleet_gauges=None,
            recorder=self.recorder,
            checkpointer=self.checkpointer,
            emit=events.emit,
        )

        async def collect_once() -> None:
            """Collect events, as the fleet's monitor and the group of agent workers do."""
            await fleet.collect_progress()
            events.take(AGENT_WORKER, agent_events.take(), clock())

        async def collect() -> None:
            while True:
                await asyncio.sleep(1.0 if events.is_on else self.collect_s)
                await collect_once()

        driver = Driver(fleet, manager, buffer, agents)
        await manager.update_weights(0)
        started = clock()
        await run_with_background(loop.run(), background=[rollouter.run(), collect(), *self.beside(driver)])
        seconds = clock() - started
        await collect_once()
        return seconds

    def _evaluate(self, agents: AgentWorker, fleet: ReplicaFleet, manager: CheckpointManager) -> Evaluate | None:
        if not self.held_out:
            return None
        evaluator = make_evaluator(
            self.config,
            rows=self.held_out,
            router=fleet.router,
            ask=agents.evaluate,
            failures=FailureBudget(),
            on_lost=fleet.lose,
        )
        pinned = PinnedEvaluator(
            evaluator=evaluator,
            fleet=fleet,
            updating=manager.updating,
            catch_up=manager.catch_up,
            num_replicas=self.config.evaluation.replicas,
            report=[].append,
        )
        return pinned.evaluate


def without_deadlines(config: Config) -> Config:
    """Return the config with deadlines that no virtual clock reaches."""
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
