"""Starts the processes of a training run, and builds the parts of its driver over them."""

import asyncio
import hashlib
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ray.util.placement_group import PlacementGroup

from configs.checkpoint import CHECKPOINTS, INITIAL_MODEL
from configs.data import NO_FILES
from configs.mixture import sources_of
from configs.runtime.deadline import within
from configs.schema import Config
from rollout.actors.place import own_place
from rollout.agents.loop import AgentLoop
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.engines.base import EngineSpec
from rollout.events.driver import DRIVER, NO_EVENTS, DriverEvents, reporting
from rollout.events.event import Emit, nobody
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.health import FleetMonitor
from rollout.fleet.operator import FleetOperator
from rollout.replica.lifecycle import ReplicaState
from rollout.replica.replica_group import ReplicaActor, ReplicaHandle
from rollout.types import Prompt
from scripts.command.resume import Resumed
from scripts.launch.agents import check_chat_template, start_agents
from scripts.launch.cluster import set_up_in
from scripts.launch.conversations import Both, encode_conversations
from scripts.launch.data import Rows, encode_sources
from scripts.launch.driver import largest_group, make_fleet, make_monitor_and_operator
from scripts.launch.models import adapter_spec, boot_model, engine_spec, policy_model, serves_adapter
from scripts.launch.nodes import check_nodes
from scripts.launch.placement import Placement, reserve
from scripts.launch.replicas import ReplicaStarter
from scripts.launch.teacher import TEACHER, VERSION, StartedTeacher, start_teacher, teacher_model, teacher_spec
from trainer.checkpoint.store import CheckpointStore
from trainer.ports import WeightUpdater
from trainer.supervised.demonstrations import DemonstrationStream
from trainer.tracking.console import Console
from trainer.tracking.events.kinds import RunStarted
from trainer.tracking.live_console import ReplicaView
from trainer.worker.recovery import RecoveringUpdater, RecoveringWorkers
from trainer.worker.worker_group import TrainWorkerGroup
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.published import PublishedTensors
from weight_sync.transports.cleanup import release_all
from weight_sync.transports.registry import make_sender


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The rows of the run, in tokens, with data.sources source by source."""

    train: list[Prompt]
    held_out: list[Prompt] | None
    """None: nothing is held out, and nothing evaluated."""
    demonstrations: DemonstrationStream | None
    """The conversations that are learned beside the rollouts, with algorithm.ce_coef."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRun:
    """All parts of a run, started and waiting for the first weights."""

    replicas: list[ReplicaHandle]
    fleet: ReplicaFleet
    control: FleetControl
    monitor: FleetMonitor
    operator: FleetOperator
    agents: AgentWorkerGroup
    workers: RecoveringWorkers
    manager: WeightUpdater
    published: PublishedTensors
    """The tensors that the manager has published."""
    store: CheckpointStore
    rows: EncodedRows
    teacher: StartedTeacher | None

    def views(self) -> list[ReplicaView]:
        """Return the replicas as the console shows them."""
        is_paused = self.control.paused is not None
        return [
            ReplicaView(
                name=replica.name,
                state="PAUSED" if is_paused and replica.state is ReplicaState.READY else replica.state.value,
                global_steps=replica.version,
                is_dead=replica.is_dead,
            )
            for replica in list(self.fleet.replicas.values())  # at once: another thread draws the panel
        ]


@dataclass(kw_only=True)
class Starter:
    """The composition root of a training run, on the connected Ray cluster.

    Example:
        started = await Starter(config=config, device="cpu", run_dir=run_dir, rows=rows, console=console).start()
    """

    config: Config
    device: str
    run_dir: Path
    rows: Mapping[str, Rows]
    """The rows of each source (`load_sources`)."""
    console: Console
    conversations: Both | None = None
    """The conversations that are learned beside the rollouts."""
    actor_class: type[ReplicaActor] = ReplicaActor
    agent_loop: AgentLoop | None = None
    resumed: Resumed | None = None
    events: DriverEvents = NO_EVENTS

    def __post_init__(self) -> None:
        self._on_start = set_up_in(self.run_dir, self.config.ray)
        self._report = reporting(self.events, self.console.message)

    async def start(self) -> StartedRun:
        """Start every process, and return when all of them are ready.

        Engines start on untrained weights while the tiny model warms up, and receive the policy with the first update.
        """
        config, console = self.config, self.console
        self.events.emit(own_place().started(DRIVER))
        placement = await reserve(config, self.device, console.message)
        await check_nodes(config, self.device, self.run_dir, console.message)
        goes_on = self.resumed is not None and self.resumed.checkpoint.is_of(self.run_dir)
        boot_path = await boot_model(config, self.run_dir, goes_on=goes_on)
        teacher_path = await teacher_model(config, self.run_dir, boot_path, goes_on=goes_on)
        boot_path, spec = await self._choose_weights(boot_path)
        starter = self._replica_starter(spec, placement)
        replicas = starter.create_first(placement.replicas)
        clients = [replica.client for replica in replicas]
        agents = start_agents(config, boot_path, clients, self._on_start, self.agent_loop, self.events)
        starter.connect = lambda replica: agents.connect(replica.client)
        store = CheckpointStore(self.run_dir / CHECKPOINTS)
        workers = make_workers(
            config,
            self.device,
            self.run_dir,
            store=store,
            report=console.message,
            placement=placement.trainer,
            emit=self.events.emit,
        )
        what = "starting replicas and train workers"
        console.stage(what)
        # A task group: when one of them cannot start, the others need not go on, and its error is the run's.
        async with asyncio.TaskGroup() as tasks:
            # Not within the deadline of the replicas: it has those of the warm-up and of the train workers.
            num_parameters = tasks.create_task(self._load_policy(workers, boot_path))
            async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", "starting replicas"):
                engines = [tasks.create_task(self._load_engine(starter, replica)) for replica in replicas]
                teacher = tasks.create_task(self._start_teacher(teacher_path, placement))
                rows = await self._encode(agents, boot_path)
                await asyncio.wait([*engines, teacher])  # the group tells what fails
        size = f"{num_parameters.result() / 1e6:.2f}M"
        console.message(f"policy: {size} parameters; {self.device}; run folder {self.run_dir}")

        fleet, control = make_fleet(config, replicas, self._report, self.events)
        updates = CheckpointManager(workers, fleet, config.weight_sync)
        manager = RecoveringUpdater(updates, workers)
        monitor, operator = make_monitor_and_operator(
            config, fleet=fleet, control=control, catch_up=manager.catch_up, start=starter.start
        )
        return StartedRun(
            replicas=replicas,
            fleet=fleet,
            control=control,
            monitor=monitor,
            operator=operator,
            agents=agents,
            workers=workers,
            manager=manager,
            published=updates.published_tensors,
            store=store,
            rows=rows,
            teacher=teacher.result(),
        )

    async def _choose_weights(self, boot_path: str) -> tuple[str, EngineSpec]:
        """Return the folder of the weights that replicas start with, and how they are loaded. Those of `boot_path` are
        untrained; where updates bring the adapter only, they must be the policy's from the start."""
        if serves_adapter(self.config):
            policy_path = await self._policy_model(boot_path)
            return policy_path, adapter_spec(self.config, self.device, policy_path)
        return boot_path, engine_spec(self.config, self.device, boot_path)

    async def _policy_model(self, boot_path: str) -> str:
        """Return the policy before the first step. The run folder keeps it where this project makes it, so that a
        replay finds it, and a run that goes on here finds its reference."""
        kept = self.run_dir / INITIAL_MODEL
        if self.resumed is None:
            shutil.rmtree(kept, ignore_errors=True)  # of an earlier process, which has saved no checkpoint
        return await policy_model(self.config, boot_path, self.console, kept)

    def _replica_starter(self, spec: EngineSpec, placement: Placement) -> ReplicaStarter:
        return ReplicaStarter(
            config=self.config,
            spec=spec,
            on_start=self._on_start,
            report=self._report,
            reserve=placement.reserve_replica,
            actor_class=self.actor_class,
            recorded_in=self.run_dir if self.config.trainer.record_tokens else None,
            tells_events=self.events.is_on,
            emit=self.events.emit,
        )

    async def _load_engine(self, starter: ReplicaStarter, replica: ReplicaHandle) -> None:
        with self.console.during(f"loading vLLM in {replica.name}"):
            await starter.load(replica)

    async def _start_teacher(self, path: str | None, placement: Placement) -> StartedTeacher | None:
        """`path`: the teacher's model; None where there is no teacher."""
        if path is None:
            return None
        starter = ReplicaStarter(
            config=self.config,
            spec=teacher_spec(self.config, self.device, path),
            on_start=self._on_start,
            report=self._report,
            kind=TEACHER,
            reserve=placement.reserve_teacher,
            loaded_version=VERSION,
            tells_events=self.events.is_on,
            emit=self.events.emit,
        )
        return await start_teacher(starter, placement.teachers, self.console, self.events)

    async def _load_policy(self, workers: RecoveringWorkers, boot_path: str) -> int:
        """Load the policy in the train workers, and the checkpoint that is resumed. Returns the number of
        parameters."""
        config, console = self.config, self.console
        path = boot_path if serves_adapter(config) else await self._policy_model(boot_path)
        with console.during(f"loading the policy in {config.trainer.num_ranks} train worker(s)"):
            num_parameters = await workers.setup(path)
            if self.resumed is not None:
                await workers.resume(self.resumed.checkpoint)
        return num_parameters

    async def _encode(self, agents: AgentWorkerGroup, boot_path: str) -> EncodedRows:
        """Encode the rows. Also warn of a chat template that sessions cannot handle well."""
        config, console = self.config, self.console
        rows = {source: train for source, (train, _) in self.rows.items()}
        train = await encode_sources(config, agents, "train", rows, console)
        rows = {source: held_out for source, (_, held_out) in self.rows.items() if held_out is not None}
        held_out = await encode_sources(config, agents, "held-out", rows, console) if rows else None
        for source in sources_of(config):
            if source.name not in rows:
                whose, what = (f"{source.name} ", "nothing of it") if source.name else ("", "nothing")
                console.message(f"{whose}held-out: none (data.val_files={NO_FILES}), so {what} is evaluated")
        if (problem := await check_chat_template(config, agents)) is not None:
            console.message(f"warning: {problem}")
        demonstrations = None
        if self.conversations is not None:
            learned = await encode_conversations(config, boot_path, self.conversations)
            console.message(learned.sentence(config))
            demonstrations = DemonstrationStream(learned.train, config.seed)
        return EncodedRows(train, held_out, demonstrations)


def make_workers(
    config: Config,
    device: str,
    run_dir: Path,
    *,
    store: CheckpointStore,
    report: Callable[[str], None],
    placement: PlacementGroup | None = None,
    emit: Emit = nobody,
) -> RecoveringWorkers:
    """Return train workers that restart from the newest checkpoint in `store` when one dies. `placement`: one bundle
    for each of them."""
    group = TrainWorkerGroup(
        config=config,
        device=device,
        make_sender=partial(make_sender, config.weight_sync, owner(run_dir)),
        on_start=set_up_in(run_dir, config.ray),
        release=partial(release_all, config.weight_sync, owner(run_dir)),
        placement=placement,
        emit=emit,
    )
    return RecoveringWorkers(group=group, store=store, config=config, report=report, emit=emit)


def owner(run_dir: Path) -> str:
    """Return the name under which all processes of a run folder on this machine publish weights, and remove those of a
    killed one."""
    return hashlib.sha256(f"{socket.gethostname()}:{run_dir.resolve()}".encode()).hexdigest()[:12]


def run_started(config: Config, global_steps: int) -> RunStarted:
    """Return the event with which a process of a run begins to train. `global_steps`: the step that it goes on from."""
    return RunStarted(
        global_steps=global_steps,
        total_steps=config.trainer.total_steps,
        prompts_per_step=config.trainer.prompts_per_step,
        group_size=largest_group(config),
        max_staleness=config.rollout.max_staleness,
        num_replicas=config.rollout.num_replicas,
        num_ranks=config.trainer.num_ranks,
        host=socket.gethostname(),
    )
