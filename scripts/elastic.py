"""A run's fleet that heals and changes: who watches it, who starts its replicas, and the socket of scripts/fleet.py."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from configs.deadline import within
from configs.schema import Config
from rollout.agent_worker_group import AgentWorkerGroup
from rollout.engines.base import EngineSpec
from rollout.fleet import ReplicaFleet
from rollout.fleet_member import FleetMember
from rollout.fleet_monitor import FleetMonitor
from rollout.fleet_operator import FleetOperator
from rollout.health import HealthMonitor
from rollout.http.fleet_app import fleet_app
from rollout.http.server import served
from rollout.http.unix_socket import linked_socket
from rollout.progress import Progress
from rollout.replica_group import ReplicaActor, ReplicaHandle, create_replica
from rollout.router import ReplicaRouter, max_inflight
from scripts.fleet import SOCKET_FILE
from weight_sync.checkpoint_manager import CheckpointManager


class ReplicaStarter:
    """Starts a replica as those of the run's start were: a `FleetOperator`'s `start`."""

    def __init__(
        self,
        config: Config,
        spec: EngineSpec,
        agents: AgentWorkerGroup,
        on_start: Callable[[str], Callable[[], None]],
        actor_class: type[ReplicaActor],
        report: Callable[[str], None],
    ):
        self._report = report
        self._config = config
        self._spec = spec
        self._agents = agents
        self._on_start = on_start
        self._actor_class = actor_class

    async def __call__(self, name: str) -> ReplicaHandle:
        """Waits without a deadline until Ray has found a place: maybe a node has to join first."""
        replica = create_replica(name, self._spec, self._on_start, self._actor_class)
        try:
            await replica.placed()
            self._report(f"{name} starts on {replica.node}")
            async with within(self._config.rollout.start_timeout_s, "rollout.start_timeout_s", f"starting {name}"):
                await replica.start(self._spec, self._config.weight_sync)
                self._agents.connect(replica)
        except BaseException:
            replica.kill()
            raise
        return replica


def make_monitor(config: Config, fleet: ReplicaFleet) -> tuple[FleetMonitor, HealthMonitor]:
    rollout = config.rollout
    health = HealthMonitor(rollout.replica_timeout_s, rollout.slow_factor)
    return FleetMonitor(fleet, health, rollout.progress_interval_s), health


def make_fleet(
    config: Config, replicas: Sequence[FleetMember], report: Callable[[str], None], progress: Progress
) -> tuple[ReplicaFleet, ReplicaRouter]:
    """Of replicas that wait for their first weights."""
    rollout = config.rollout
    inflight = max_inflight(rollout.max_num_seqs * rollout.data_parallel_size, config.algorithm.group_size)
    router = ReplicaRouter([replica.name for replica in replicas], inflight)
    return ReplicaFleet(
        replicas, router, rollout.min_replicas, report, max_replacements=rollout.max_replacements, progress=progress
    ), router


def make_monitor_and_operator(
    config: Config,
    fleet: ReplicaFleet,
    router: ReplicaRouter,
    manager: CheckpointManager,
    start: Callable[[str], Awaitable[FleetMember]],
) -> tuple[FleetMonitor, FleetOperator]:
    monitor, health = make_monitor(config, fleet)
    operator = FleetOperator(
        fleet=fleet,
        router=router,
        health=health,
        start=start,
        catch_up=manager.catch_up,
        drain_timeout_s=config.rollout.group_timeout_s,
    )
    return monitor, operator


@asynccontextmanager
async def fleet_socket(operator: FleetOperator, run_dir: Path) -> AsyncIterator[None]:
    """scripts/fleet.py can reach the run while the block runs."""
    with linked_socket(run_dir / SOCKET_FILE) as listener:
        async with served(fleet_app(operator), listener):
            yield
