"""Starts the processes of a training run, and builds the components of its driver over them."""

import asyncio
import hashlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ray.util.placement_group import PlacementGroup

from configs.checkpoint import CHECKPOINTS
from configs.runtime.deadline import within
from configs.schema import Config
from rollout.agents.loop import AgentLoop
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.engines.base import EngineSpec
from rollout.events.driver import NO_EVENTS, DriverEvents, reporting
from rollout.events.event import Emit, nobody
from rollout.events.kinds import Report
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.lifecycle import ReplicaState
from rollout.fleet.monitor import FleetMonitor
from rollout.fleet.operator import FleetOperator
from rollout.prompts import Row
from rollout.replica.replica_group import ReplicaActor, ReplicaHandle, create_replica
from rollout.types import Prompt
from scripts.launch.cluster import output_to
from scripts.launch.conversations import Both, encode_conversations
from scripts.launch.data import encode_rows
from scripts.launch.driver import make_fleet, make_monitor_and_operator
from scripts.launch.models import adapter_spec, boot_model, engine_spec, policy_model, serves_adapter
from scripts.launch.placement import Placement, reserve
from scripts.launch.replicas import start_replica
from scripts.launch.resume import Resumed
from scripts.launch.teacher import StartedTeacher, start_teacher, teacher_model
from trainer.checkpoint.store import CheckpointStore
from trainer.supervised.demonstrations import DemonstrationStream
from trainer.tracking.console import Console
from trainer.tracking.live_console import ReplicaView
from trainer.worker.recovery import RecoveringUpdater, RecoveringWorkers, WeightUpdater
from trainer.worker.worker_group import TrainWorkerGroup
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.transports.cleanup import release_all
from weight_sync.transports.registry import make_sender


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The rows of the run, in tokens."""

    train: list[Prompt]
    held_out: list[Prompt]
    demonstrations: DemonstrationStream | None
    """With algorithm.ce_coef: what is learned beside the rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRun:
    """Everything of a run, started and waiting for its first weights."""

    replicas: list[ReplicaHandle]
    fleet: ReplicaFleet
    control: FleetControl
    monitor: FleetMonitor
    operator: FleetOperator
    agents: AgentWorkerGroup
    workers: RecoveringWorkers
    manager: WeightUpdater
    store: CheckpointStore
    rows: EncodedRows
    teacher: StartedTeacher | None

    def views(self) -> list[ReplicaView]:
        """The replicas as the console shows them."""
        is_paused = self.control.paused is not None
        return [
            ReplicaView(
                name=life.name,
                state="PAUSED" if is_paused and life.state is ReplicaState.READY else life.state.value,
                global_steps=life.global_steps,
                is_dead=life.state is ReplicaState.DEAD,
            )
            for life in list(self.fleet.lives.values())  # at once, because the panel is drawn by another thread
        ]


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The fleet of the replicas, and what updates it and keeps it whole."""

    fleet: ReplicaFleet
    control: FleetControl
    manager: WeightUpdater
    monitor: FleetMonitor
    operator: FleetOperator


async def start(  # noqa: PLR0913
    config: Config,
    device: str,
    run_dir: Path,
    *,
    rows: tuple[list[Row], list[Row]],
    conversations: Both | None = None,
    console: Console,
    actor_class: type[ReplicaActor] = ReplicaActor,
    agent_loop: AgentLoop | None = None,
    resumed: Resumed | None = None,
    events: DriverEvents = NO_EVENTS,
) -> StartedRun:
    """Starts a run on the connected Ray cluster. `rows` are the training and the held-out ones; `conversations` those
    that are learned beside the rollouts.

    Engines start on untrained weights while the tiny model warms up, and receive the policy with the first update.
    """
    on_start = output_to(run_dir)
    placement = await reserve(config, device)
    boot_path = await boot_model(config, run_dir)
    teacher_path = await teacher_model(config, run_dir, boot_path)
    report = reporting(events, console.message)
    boot_path, spec = await _engine(config, device, boot_path, console)
    recorded_in = run_dir if config.trainer.record_tokens else None
    create = partial(create_replica, spec=spec, on_start=on_start, actor_class=actor_class)
    create = partial(create, recorded_in=recorded_in, tells_events=events.is_on)
    replicas = [create(f"replica-{index}", group=group) for index, group in enumerate(placement.replicas)]
    make_agents = partial(AgentWorkerGroup, config=config, on_start=on_start, agent_loop=agent_loop, events=events)
    agents = make_agents(tokenizer_path=boot_path, replicas=[replica.client for replica in replicas])
    store = CheckpointStore(run_dir / CHECKPOINTS)
    train_workers = partial(make_workers, config, device, run_dir, store=store, placement=placement.trainer)
    workers = train_workers(report=console.message, emit=events.emit)

    console.stage("starting replicas and train workers")
    deadline = within(config.rollout.start_timeout_s, "rollout.start_timeout_s", "starting replicas and train workers")
    async with deadline, asyncio.TaskGroup() as starting:
        for replica in replicas:
            starting.create_task(_load_engine(replica, spec, config, console))
        teach = partial(start_teacher, placement=placement, on_start=on_start, report=report, events=events)
        teacher = starting.create_task(teach(config, device, teacher_path, console))
        policy = starting.create_task(_load_policy(config, workers, boot_path, console, resumed))
        encoded = await _encode(config, agents, rows, conversations, boot_path=boot_path, console=console)
    console.message(f"policy: {policy.result() / 1e6:.2f}M parameters; {device}; run folder {run_dir}")
    later = partial(start_replica, create=partial(_create_later, create=create, placement=placement), spec=spec)
    start_one = partial(later, connect=partial(_connect, agents), config=config, report=report)
    fleet = _fleet_parts(config, replicas, workers, start_one=start_one, report=report, events=events)
    return StartedRun(
        replicas=replicas,
        fleet=fleet.fleet,
        control=fleet.control,
        monitor=fleet.monitor,
        operator=fleet.operator,
        agents=agents,
        workers=workers,
        manager=fleet.manager,
        store=store,
        rows=encoded,
        teacher=teacher.result(),
    )


async def _engine(config: Config, device: str, boot_path: str, console: Console) -> tuple[str, EngineSpec]:
    """Returns what replicas start with: a folder of weights and how to load it. Those of `boot_path` are untrained;
    where updates bring the adapter only, they must be the policy's from the start."""
    if serves_adapter(config):
        policy_path = await policy_model(config, boot_path, console)
        return policy_path, adapter_spec(config, device, policy_path)
    return boot_path, engine_spec(config, device, boot_path)


def _fleet_parts(
    config: Config,
    replicas: Sequence[ReplicaHandle],
    workers: RecoveringWorkers,
    *,
    start_one: Callable[[str], Awaitable[ReplicaHandle]],
    report: Report,
    events: DriverEvents,
) -> _Fleet:
    fleet, control = make_fleet(config, replicas, report, events)
    manager = RecoveringUpdater(CheckpointManager(workers, fleet, config.weight_sync), workers)
    monitor, operator = make_monitor_and_operator(
        config, fleet=fleet, control=control, catch_up=manager.catch_up, start=start_one
    )
    return _Fleet(fleet, control, manager, monitor, operator)


async def _encode(
    config: Config,
    agents: AgentWorkerGroup,
    rows: tuple[list[Row], list[Row]],
    conversations: Both | None,
    *,
    boot_path: str,
    console: Console,
) -> EncodedRows:
    """Warns of a chat template that sessions have trouble with, too."""
    train = await encode_rows(config, agents, "train", rows[0], console)
    held_out = await encode_rows(config, agents, "held-out", rows[1], console)
    if (problem := await agents.check_chat_template()) is not None:
        console.message(f"warning: {problem}")
    demonstrations = None
    if conversations is not None:
        learned = await encode_conversations(config, boot_path, conversations)
        console.message(learned.sentence(config))
        demonstrations = DemonstrationStream(learned.train, config.seed)
    return EncodedRows(train, held_out, demonstrations)


async def _load_engine(replica: ReplicaHandle, spec: EngineSpec, config: Config, console: Console) -> None:
    with console.during(f"loading vLLM in {replica.name}"):
        await replica.start(spec, config.weight_sync)


async def _load_policy(
    config: Config, workers: RecoveringWorkers, boot_path: str, console: Console, resumed: Resumed | None
) -> int:
    """Returns the number of parameters."""
    path = boot_path if serves_adapter(config) else await policy_model(config, boot_path, console)
    with console.during(f"loading the policy in {config.trainer.num_ranks} train worker(s)"):
        num_parameters = await workers.setup(path)
        if resumed is not None:
            await workers.resume(resumed.checkpoint)
    return num_parameters


async def _create_later(name: str, *, create: Callable[..., ReplicaHandle], placement: Placement) -> ReplicaHandle:
    return create(name, group=await placement.reserve_replica())


async def _connect(agents: AgentWorkerGroup, replica: ReplicaHandle) -> None:
    agents.connect(replica.client)


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
    """Train workers that restart from the newest checkpoint in `store` when one dies. `placement`: one bundle each."""
    group = TrainWorkerGroup(
        config=config,
        device=device,
        make_sender=partial(make_sender, config.weight_sync, owner(run_dir)),
        on_start=output_to(run_dir),
        release=partial(release_all, config.weight_sync, owner(run_dir)),
        placement=placement,
        emit=emit,
    )
    return RecoveringWorkers(group=group, store=store, config=config, report=report, emit=emit)


def owner(run_dir: Path) -> str:
    """The name under which all processes of a run folder on this machine publish weights, and remove those of a killed
    one."""
    return hashlib.sha256(f"{socket.gethostname()}:{run_dir.resolve()}".encode()).hexdigest()[:12]
