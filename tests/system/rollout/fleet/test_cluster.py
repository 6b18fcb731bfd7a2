"""Replicas on a Ray cluster of several nodes, with simulated engines: nodes that leave and nodes that join."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from configs.schema import Config, RolloutConfig
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica_group import ReplicaHandle, create_replica
from rollout.types import Completion
from scripts.launch.cluster import without_trainer
from scripts.launch.driver import make_fleet, make_monitor_and_operator
from scripts.launch.leaving_nodes import watch_leaving_nodes
from scripts.launch.placement import Placement
from tests.support.actors import SPEC, NoAgents, SimulatedActor, Source, make_starter, no_redirect
from tests.support.fakes import make_request
from weight_sync.checkpoint_manager import CheckpointManager

pytestmark = pytest.mark.slow

CONFIG = Config(rollout=RolloutConfig(num_replicas=2, max_num_seqs=8, progress_interval_s=0.2, replica_timeout_s=20))
DEADLINE_S = 60


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A head without room for replicas, and two nodes with room for one each."""
    # A node is known to be dead 5 s after it died. Until then a replica may be placed there: its place seems free.
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Scene:
    def __init__(self, replicas: list[ReplicaHandle]) -> None:
        self.told: list[str] = []
        self.agents = NoAgents()
        self.fleet, control = make_fleet(CONFIG, replicas, lambda event: self.told.append(event.text))
        self.manager = CheckpointManager(Source(), self.fleet, CONFIG.weight_sync)
        reserve = Placement(without_trainer(CONFIG), "cpu").reserve_replica
        starter = make_starter(CONFIG, no_redirect, self.agents, self.told, reserve)
        self.monitor, self.operator = make_monitor_and_operator(
            CONFIG, fleet=self.fleet, control=control, catch_up=self.manager.catch_up, start=starter.start
        )

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not what():
                await asyncio.sleep(0.1)

    def states(self) -> dict[str, str]:
        return {row.name: row.state for row in self.operator.rows() if row.state != "DEAD"}


@asynccontextmanager
async def running_scene() -> AsyncIterator[Scene]:
    replicas = [create_replica(f"replica-{index}", SPEC, no_redirect, SimulatedActor) for index in range(2)]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(replica.start(SPEC, CONFIG.weight_sync) for replica in replicas))
    scene = Scene(replicas)
    await scene.manager.update_weights(3)
    async with asyncio.TaskGroup() as loops:
        tasks = [loops.create_task(loop.run()) for loop in (scene.monitor, scene.operator)]
        yield scene
        for task in tasks:
            task.cancel()


async def generate(fleet: ReplicaFleet, name: str) -> list[Completion]:
    (replica,) = [replica for replica in fleet.running if replica.name == name]
    assert isinstance(replica, ReplicaHandle)
    return await replica.client.generate_group([make_request(f"to {name}", 20)])


def test_a_node_that_leaves_takes_its_replicas_and_one_that_joins_gets_their_replacements(nodes: Cluster) -> None:
    async def main() -> None:
        async with running_scene() as scene:
            assert scene.states() == {"replica-0": "READY", "replica-1": "READY"}
            victim = next(node for node in nodes.list_all_nodes() if node is not nodes.head_node)
            on_victim = [r.name for r in scene.fleet.running if r.place and r.place.node_id == victim.node_id]  # pyright: ignore
            (lost,) = on_victim
            nodes.remove_node(victim, allow_graceful=False)
            await scene.until(lambda: scene.states().get("replica-2") == "STARTING")
            (kept,) = {"replica-0", "replica-1"} - {lost}
            assert scene.fleet.router.healthy == [kept]
            assert scene.operator.add(1) == ["replica-3"]
            await asyncio.sleep(8)  # by now it is known that the node is dead
            assert scene.states() == {kept: "READY", "replica-2": "STARTING", "replica-3": "STARTING"}, "no room"
            started = time.monotonic()
            nodes.add_node(num_cpus=2)  # it sets signal handlers, which only the main thread may
            await scene.until(lambda: sorted(scene.states().values()) == ["READY"] * 3)
            assert time.monotonic() - started < DEADLINE_S
            assert sorted(scene.agents.connected) == ["replica-2", "replica-3"]
            for name in ("replica-2", "replica-3"):
                (completion,) = await generate(scene.fleet, name)
                assert set(completion.token_ids) == {3}, "of the current weights"
            gauges = scene.fleet.gauges()
            assert (gauges["rollout/replicas_lost"], gauges["rollout/replicas_replaced"]) == (1, 1)

    asyncio.run(main())


def test_a_replica_is_drained_before_its_node_leaves_and_its_replacement_serves_on_another(nodes: Cluster) -> None:
    async def main() -> None:
        async with running_scene() as scene:
            first, second = scene.fleet.running
            assert isinstance(first, ReplicaHandle) and first.place is not None
            leaving = asyncio.create_task(watch_leaving_nodes(scene.operator))
            reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # pyright: ignore
            deadline_ms = int(1000 * (time.time() + 10 * DEADLINE_S))
            gcs = ray._raylet.GcsClient(address=nodes.address)  # pyright: ignore
            assert gcs.drain_node(first.place.node_id, reason, "spot", deadline_ms) == (True, "")
            await scene.until(lambda: scene.states() == {second.name: "READY", "replica-2": "STARTING"})
            assert str(scene.fleet.replicas[first.name].reason) == "drained"
            nodes.add_node(num_cpus=1)
            await scene.until(lambda: scene.states() == {second.name: "READY", "replica-2": "READY"})
            assert scene.fleet.gauges()["rollout/replicas_lost"] == 0
            leaving.cancel()

    asyncio.run(main())
