"""The fleet of a run with what keeps it whole, over replicas of any kind."""

from collections.abc import Awaitable, Callable, Sequence

from configs.schema import Config
from rollout.evaluation.pinned import Updates
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.health import HealthMonitor
from rollout.fleet.member import FleetMember
from rollout.fleet.monitor import FleetMonitor
from rollout.fleet.operator import FleetOperator
from rollout.router import ReplicaRouter, max_inflight


def make_monitor(config: Config, fleet: ReplicaFleet) -> tuple[FleetMonitor, HealthMonitor]:
    rollout = config.rollout
    health = HealthMonitor(rollout.replica_timeout_s, rollout.slow_factor)
    return FleetMonitor(fleet, health, rollout.progress_interval_s), health


def make_fleet(
    config: Config, replicas: Sequence[FleetMember], report: Callable[[str], None]
) -> tuple[ReplicaFleet, FleetControl]:
    """`replicas`: they wait for their first weights."""
    rollout = config.rollout
    inflight = max_inflight(rollout.max_num_seqs * rollout.data_parallel_size, config.algorithm.group_size)
    router = ReplicaRouter([replica.name for replica in replicas], inflight)
    fleet = ReplicaFleet(
        replicas,
        router,
        rollout.min_replicas,
        report,
        max_replacements=rollout.max_replacements,
        answer_timeout_s=rollout.answer_timeout_s,
    )
    return fleet, FleetControl(fleet, config.weight_sync.pause_timeout_s)


def make_monitor_and_operator(
    config: Config,
    fleet: ReplicaFleet,
    control: FleetControl,
    manager: Updates,
    start: Callable[[str], Awaitable[FleetMember]],
) -> tuple[FleetMonitor, FleetOperator]:
    monitor, health = make_monitor(config, fleet)
    operator = FleetOperator(
        fleet=fleet,
        control=control,
        health=health,
        start=start,
        catch_up=manager.catch_up,
        drain_timeout_s=config.rollout.group_timeout_s,
    )
    return monitor, operator
