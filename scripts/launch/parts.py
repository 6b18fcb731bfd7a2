"""The parts of a run."""

from dataclasses import dataclass

from rollout.agents.worker_group import AgentWorkerGroup
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.monitor import FleetMonitor
from rollout.fleet.operator import FleetOperator
from rollout.prompts import EncodedRow
from rollout.replica.replica_group import ReplicaHandle
from trainer.checkpoint.store import CheckpointStore
from trainer.worker.recovery import RecoveringUpdater, RecoveringWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of, all of it started."""

    replicas: list[ReplicaHandle]
    fleet: ReplicaFleet
    control: FleetControl
    monitor: FleetMonitor
    operator: FleetOperator
    agents: AgentWorkerGroup
    workers: RecoveringWorkers
    store: CheckpointStore
    train_rows: list[EncodedRow]
    val_rows: list[EncodedRow]
    manager: RecoveringUpdater
