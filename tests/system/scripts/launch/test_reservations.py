"""Placement groups on a Ray cluster of three nodes that say they have four GPUs each: where ranks and replicas are."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group_table

from configs.schema import Config, RayConfig, RolloutConfig, TrainerConfig, Transport, WeightSyncConfig
from configs.validate import ConfigError
from rollout.replica.replica_group import create_replica
from scripts.launch.cluster import own_raylet, without_trainer
from scripts.launch.placement import Placement, node_ids
from tests.support.actors import SPEC, NoAgents, SimulatedActor, make_starter, no_redirect
from tests.support.compose import changed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=8, num_gpus=4)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def config(num_ranks: int, num_replicas: int, tensor_parallel_size: int = 1) -> Config:
    return Config(
        rollout=RolloutConfig(num_replicas=num_replicas, tensor_parallel_size=tensor_parallel_size),
        trainer=TrainerConfig(num_ranks=num_ranks),
        weight_sync=WeightSyncConfig(transport=Transport.collective),
        ray=RayConfig(placement_timeout_s=2),
    )


def places(config: Config) -> tuple[list[str], list[str]]:
    """Nodes of the ranks and of the replicas, while they are reserved."""
    placement = Placement(config, "cuda")
    asyncio.run(placement.reserve())
    assert placement.trainer is not None
    found = node_ids(placement.trainer), [node for group in placement.replicas for node in node_ids(group)]
    placement.remove()
    return found


def test_ranks_are_together_and_replicas_apart() -> None:
    ranks, replicas = places(config(num_ranks=4, num_replicas=4))
    assert len(ranks) == 4 and len(set(ranks)) == 1
    assert sorted(replicas.count(node) for node in set(replicas)) == [2, 2] and ranks[0] not in replicas


def test_what_needs_most_of_a_node_gets_it_first() -> None:
    ranks, replicas = places(config(num_ranks=2, num_replicas=2, tensor_parallel_size=4))
    assert len(set(ranks)) == 1 and len({*ranks, *replicas}) == 3


def test_weights_that_travel_within_a_machine_keep_all_on_one() -> None:
    shared = changed(config(num_ranks=2, num_replicas=2), weight_sync__transport=Transport.shared_memory)
    ranks, replicas = places(shared)
    assert len({*ranks, *replicas}) == 1
    with pytest.raises(ConfigError, match=r"all on one machine for weight_sync\.transport=shared_memory .* no room"):
        places(changed(shared, rollout__num_replicas=3))


def test_without_room_a_run_ends_before_it_starts_and_holds_nothing() -> None:
    with pytest.raises(ConfigError) as caught:
        places(config(num_ranks=3, num_replicas=3, tensor_parallel_size=4))
    message = str(caught.value)
    assert message.startswith(
        "trainer.num_ranks=3 with 1 CPU and 1 GPU each, rollout.num_replicas=3 with 1 CPU and 4 GPU"
    )
    assert "ray.placement_timeout_s=2; free are 0 GPU" in message and message.count("(4 GPU, 8 CPU)") == 3
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel_size=8 x .* on one node, and the largest has 4"):
        places(config(num_ranks=1, num_replicas=1, tensor_parallel_size=8))
    ends = time.monotonic() + 20
    while ray.available_resources().get("GPU") != 12:
        assert time.monotonic() < ends, "what was reserved is given back"
        time.sleep(0.1)


def test_all_replicas_are_asked_for_at_once() -> None:
    """So that an autoscaler knows of all. Three have room."""

    async def scenario() -> None:
        reserving = asyncio.create_task(Placement(config(0, 5, tensor_parallel_size=4), "cuda").reserve())
        await asyncio.sleep(1)
        states = [group["state"] for group in placement_group_table().values()]
        assert (states.count("CREATED"), states.count("PENDING")) == (3, 2)
        with pytest.raises(ConfigError, match="found no room within"):
            await reserving

    asyncio.run(scenario())


def test_a_replica_runs_where_it_was_reserved_and_gives_it_back() -> None:
    spec = replace(SPEC, device="cuda", tensor_parallel_size=2)
    alone = without_trainer(config(num_ranks=1, num_replicas=1, tensor_parallel_size=2))

    async def scenario() -> None:
        placement = Placement(alone, "cuda")
        await placement.reserve()
        replica = create_replica("replica-0", spec, no_redirect, SimulatedActor, placement.replicas[0])
        await replica.placed()
        assert [replica.place and replica.place.node_id] == node_ids(placement.replicas[0])
        replica.kill()
        until_removed(placement.replicas[0])
        assert node_ids(placement.replicas[0]) == []

    asyncio.run(scenario())


def until_removed(group: PlacementGroup) -> None:
    ends = time.monotonic() + 20
    while placement_group_table(group)["state"] != "REMOVED":
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_replica_that_cannot_be_created_gives_back_what_was_reserved_for_it(tmp_path: Path) -> None:
    (no_folder := tmp_path / "run").write_text("")
    reserved: list[PlacementGroup] = []

    async def reserve() -> PlacementGroup:
        reserved.append(await Placement(config(num_ranks=0, num_replicas=1), "cuda").reserve_replica())
        return reserved[0]

    starter = replace(make_starter(Config(), no_redirect, NoAgents(), [], reserve), recorded_in=no_folder)
    with pytest.raises(OSError, match="Not a directory|File exists"):
        asyncio.run(starter.start("replica-7"))
    until_removed(reserved[0])


def test_a_run_watches_the_raylet_that_it_is_connected_to(nodes: Cluster) -> None:
    (raylet,) = own_raylet()
    assert nodes.head_node is not None and raylet.pid == nodes.head_node.all_processes["raylet"][0].process.pid


def test_a_replica_that_must_be_beside_the_train_workers_follows_them_to_another_node(nodes: Cluster) -> None:
    """Their node has no room for it, and then goes."""
    shared = changed(config(num_ranks=2, num_replicas=2), weight_sync__transport=Transport.shared_memory)

    async def scenario() -> None:
        placement = Placement(shared, "cuda")
        await placement.reserve()
        assert placement.trainer is not None
        reserving = asyncio.create_task(placement.reserve_replica())
        (home,) = set(node_ids(placement.trainer))
        await asyncio.sleep(1)
        assert not reserving.done()
        (leaving,) = (node for node in nodes.list_all_nodes() if node.node_id == home)
        await asyncio.to_thread(nodes.remove_node, leaving)
        group = await asyncio.wait_for(reserving, 90)
        assert node_ids(group) == node_ids(placement.trainer)[:1] != [home]
        placement.remove()

    asyncio.run(scenario())
