"""Replicas in real Ray actors, without a model, and what stands around them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.util.placement_group import PlacementGroup

from configs.schema import Config, WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.engines.simulated import SimulatedEngine
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.health import FleetMonitor, HealthMonitor
from rollout.replica.replica import RolloutReplica
from rollout.replica.replica_group import ReplicaActor, ReplicaHandle
from scripts.launch.replicas import ReplicaStarter
from tests.support.fakes import make_manifest, make_tag
from weight_sync.protocol import Manifest, PublishOrder

SPEC = EngineSpec(
    model_path="",
    device="cpu",
    dtype="float32",
    max_model_len=128,
    max_num_seqs=8,
    kv_cache_bytes=None,
    gpu_memory_utilization=0.5,
    tensor_parallel_size=1,
    enforce_eager=True,
)


class SimulatedActor(ReplicaActor):
    """As many tokens as a request may have, 100 a second."""

    step_s = 0.01

    async def start(self, spec: EngineSpec, config: WeightSyncConfig) -> int:
        self._home = asyncio.get_running_loop()
        self._engine = SimulatedEngine(
            length_of=lambda request: request.sampling.max_tokens, step_s=self.step_s, max_num_seqs=spec.max_num_seqs
        )
        self._replica = RolloutReplica(self._name, self._engine, config, self._sampled, self._events)
        return 1


class NoAgents:
    """In place of the agent workers: notes which replicas are made known to them."""

    def __init__(self) -> None:
        self.connected: list[str] = []

    def connect(self, replica: ReplicaHandle) -> None:
        self.connected.append(replica.name)


class Source:
    """Publishes the weights of simulated engines."""

    global_steps = 3

    async def publish(self, order: PublishOrder) -> Manifest:
        return make_manifest(order.global_steps)

    async def send(self, manifest: Manifest) -> int:
        return make_tag(manifest.global_steps).checksum


def make_starter(
    config: Config,
    on_start: Callable[[str], Callable[[], None]],
    agents: NoAgents,
    told: list[str],
    reserve: Callable[[], Awaitable[PlacementGroup]] | None = None,
) -> ReplicaStarter:
    """Starts simulated replicas by name, on what is reserved for each."""
    options: Any = {} if reserve is None else {"reserve": reserve}
    return ReplicaStarter(
        config=config,
        spec=SPEC,
        on_start=on_start,
        report=lambda event: told.append(event.text),
        actor_class=SimulatedActor,
        connect=agents.connect,
        **options,
    )


def no_redirect(_name: str) -> Any:
    return nothing


def nothing() -> None:
    pass


def monitor_of(fleet: ReplicaFleet) -> FleetMonitor:
    return FleetMonitor(fleet, HealthMonitor(timeout_s=60, slow_factor=None), interval_s=1.0)
