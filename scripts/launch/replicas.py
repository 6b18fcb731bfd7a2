"""Starts a replica that joins a running run: a replacement of a lost one, or one that an operator asks for."""

from collections.abc import Awaitable, Callable

from configs.runtime.deadline import within
from configs.schema import Config
from rollout.actor_group import placed
from rollout.engines.base import EngineSpec
from rollout.events.kinds import FleetEvent, FleetEventKind, Report
from rollout.replica.replica_group import ReplicaHandle


async def start_replica(
    name: str,
    *,
    create: Callable[[str], Awaitable[ReplicaHandle]],
    config: Config,
    spec: EngineSpec,
    connect: Callable[[ReplicaHandle], Awaitable[None]],
    report: Report,
) -> ReplicaHandle:
    """Waits without a deadline until Ray has placed the actor, because a node may have to join first. `connect`: makes
    a replica whose engine runs known to those who ask it."""

    def tell(text: str) -> None:
        report(FleetEvent(FleetEventKind.STARTING, name, f"{name} {text}"))

    replica = await placed(
        lambda: create(name),
        ReplicaHandle.placed,
        ReplicaHandle.kill,
        tell,
    )
    try:
        tell(f"starts on {replica.node}")
        async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", f"starting {name}"):
            await replica.start(spec, config.weight_sync)
            await connect(replica)
    except BaseException:
        replica.kill()
        raise
    return replica
