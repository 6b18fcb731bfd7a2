"""A run's fleet that heals and changes: who starts its replicas, and the socket of scripts/fleet.py."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from configs.runtime.deadline import within
from configs.schema import Config
from rollout.actor_group import placed
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.engines.base import EngineSpec
from rollout.fleet.app import fleet_app
from rollout.fleet.operator import FleetOperator
from rollout.http.server import served
from rollout.http.unix_socket import linked_socket
from rollout.replica.replica_group import ReplicaActor, ReplicaHandle, create_replica
from scripts.fleet import SOCKET_FILE


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
        replica = await placed(
            lambda: create_replica(name, self._spec, self._on_start, self._actor_class),
            ReplicaHandle.placed,
            ReplicaHandle.kill,
            lambda text: self._report(f"{name} {text}"),
        )
        try:
            self._report(f"{name} starts on {replica.node}")
            async with within(self._config.rollout.start_timeout_s, "rollout.start_timeout_s", f"starting {name}"):
                await replica.start(self._spec, self._config.weight_sync)
                self._agents.connect(replica.client)
        except BaseException:
            replica.kill()
            raise
        return replica


@asynccontextmanager
async def fleet_socket(operator: FleetOperator, run_dir: Path) -> AsyncIterator[None]:
    """scripts/fleet.py can reach the run while the block runs."""
    with linked_socket(run_dir / SOCKET_FILE) as listener:
        async with served(fleet_app(operator), listener):
            yield
