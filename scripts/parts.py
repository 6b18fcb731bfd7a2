"""The parts of a run."""

from dataclasses import dataclass

from rollout.agent_worker_group import AgentWorkerGroup
from rollout.fleet import ReplicaFleet
from rollout.fleet_monitor import FleetMonitor
from rollout.fleet_operator import FleetOperator
from rollout.progress import Progress
from rollout.prompts import EncodedRow
from rollout.replica_group import ReplicaHandle
from rollout.router import ReplicaRouter
from trainer.checkpoint_store import CheckpointStore
from trainer.recovering_workers import RecoveringUpdater, RecoveringWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of, all of it started."""

    replicas: list[ReplicaHandle]
    router: ReplicaRouter
    fleet: ReplicaFleet
    monitor: FleetMonitor
    operator: FleetOperator
    agents: AgentWorkerGroup
    workers: RecoveringWorkers
    store: CheckpointStore
    train_rows: list[EncodedRow]
    val_rows: list[EncodedRow]
    manager: RecoveringUpdater
    progress: Progress
