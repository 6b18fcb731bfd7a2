"""Reserves what a run needs of the cluster before any of its processes starts, with Ray's placement groups.

Train ranks are together: on one node if it has room, else on as few as possible. A replica's GPUs are on one node, and
replicas are on as many nodes as possible, so that one that is lost takes few of them along. A group ends with the
replica that it is for, or with the run.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from configs.runtime.deadline import within
from configs.schema import Config, Transport
from configs.validate import ConfigError
from rollout.agents.worker_group import CPUS_PER_WORKER

Resources = Mapping[str, float]
TELL_AFTER_S = 5.0
"""The time that a reservation may take without a word."""
LOOK_S = 0.5
"""The time after which it is looked again whether a node has joined."""
ON_ONE_MACHINE = (Transport.shared_memory, Transport.cuda_ipc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster: what it has to spare, and what this run holds of it."""

    node_id: str
    free: Resources
    """The resources that this run has not reserved. Other runs may have."""
    num_replicas: int

    def fits(self, bundle: Resources) -> bool:
        return all(self.free.get(resource, 0) >= amount for resource, amount in bundle.items())


async def reserve(config: Config, device: str, say: Callable[[str], None]) -> "Placement":
    """Make the reservations with which a run begins, as `Placement.reserve` does. Says so where that takes time."""
    placement = Placement(config, device)

    def tell() -> None:
        say(placement.shortage("Ray has found no room yet, and looks for it until"))

    telling = asyncio.get_running_loop().call_later(TELL_AFTER_S, tell)
    try:
        await placement.reserve()
    finally:
        telling.cancel()
    return placement


def choose_node(nodes: Sequence[Node], bundle: Resources) -> str | None:
    """Return the node for the next replica: the one with the fewest replicas, of those the one with most to spare."""
    fitting = [node for node in nodes if node.fits(bundle)]
    if not fitting:
        return None
    spare = {node.node_id: (node.free.get("GPU", 0), node.free.get("CPU", 0)) for node in fitting}
    best = min(fitting, key=lambda node: (node.num_replicas, *(-amount for amount in spare[node.node_id])))
    return best.node_id


class Placement:
    """The reservations of a run.

    Example:
        placement = await reserve(config, "cuda", print)  # raises ConfigError when the cluster has no room
        workers = TrainWorkerGroup(..., placement=placement.trainer)
        replica = create_replica(name, spec, on_start, group=placement.replicas[0])
        another = create_replica(name, spec, on_start, group=await placement.reserve_replica())
    """

    def __init__(self, config: Config, device: str):
        rollout, trainer = config.rollout, config.trainer
        self._config = config
        self._rank = _bundle(config.gpu_share if device == "cuda" else 0)
        self._num_ranks = trainer.num_ranks
        num_gpus = config.gpu_share * rollout.tensor_parallel_size * rollout.data_parallel_size
        self._replica = _bundle(num_gpus if device == "cuda" else 0)
        num_gpus = config.gpu_share * config.teacher.tensor_parallel_size
        self._teacher = _bundle(num_gpus if device == "cuda" else 0)
        self._num_teachers = num_teachers(config)
        sends_weights = trainer.num_ranks > 0 and rollout.num_replicas > 0
        sync = config.weight_sync
        is_near = sync.transport in ON_ONE_MACHINE or sync.vllm_backend == "ipc"
        self._is_on_one_machine = sends_weights and is_near
        self.trainer: PlacementGroup | None = None
        """The reservation of the train workers, a bundle for each; None where nothing is trained."""
        self.replicas: list[PlacementGroup] = []
        """The reservations of the replicas that the run begins with, of one bundle each."""
        self.teachers: list[PlacementGroup] = []
        """The reservations of the teacher's replicas that the run begins with."""
        self._reserved: list[tuple[PlacementGroup, Resources]] = []
        """The reservations of all replicas until now, the teacher's too. Ray knows which of them have ended."""
        self._asked: list[tuple[str, Resources]] = []
        """The node that was chosen for each reservation that Ray has not made yet; empty where none was."""
        self._choosing = asyncio.Lock()
        """Held while a node is chosen: two choices at once would not know of one another, and take the same node."""

    async def reserve(self) -> None:
        """Make the first reservations. In a cluster that runs already, nodes may still join.

        Raises:
            ConfigError: there was no room within ray.placement_timeout_s, or in a cluster of this process there is no
                node on which a replica fits.
        """
        if self._config.ray.address is None:
            self._refuse_too_large()
        steps = [self._reserve_trainer] if self._num_ranks else []
        steps += [self._reserve_replicas, self._reserve_teachers]
        if not self._is_on_one_machine and self._replica.get("GPU", 0) > self._num_ranks * self._rank.get("GPU", 0):
            steps.reverse()  # what needs the larger part of a node first
        timeout_s, reserved = self._config.ray.placement_timeout_s, False
        try:
            async with within(timeout_s, "ray.placement_timeout_s", "reserving"):
                for step in steps:
                    await step()
                await self._wait_for_agents()
            reserved = True
        except TimeoutError as error:
            self._refuse_too_large()
            raise ConfigError(self.shortage("Ray found no room within")) from error
        finally:
            if not reserved:
                self.remove()

    async def reserve_replica(self) -> PlacementGroup:
        """Wait without a deadline until there is room, maybe because a node joins. Spreads replicas, unless weights
        travel within one machine: then on that of the train workers."""
        if not self._is_on_one_machine or self.trainer is None:
            return await self._reserve_bundle(self._replica, None)
        while True:
            home = await self._home(self.trainer)
            reserving = asyncio.ensure_future(self._reserve_bundle(self._replica, home))
            is_home = False
            try:
                while await self._home(self.trainer) == home:  # its machine may go, which never comes back by this name
                    if (await asyncio.wait([reserving], timeout=LOOK_S))[0]:
                        is_home = True
                        return reserving.result()
            finally:
                if not is_home:
                    reserving.cancel()
                    await asyncio.wait([reserving])
                    if not reserving.cancelled() and reserving.exception() is None:
                        remove_placement_group(reserving.result())

    async def _home(self, trainer: PlacementGroup) -> str:
        """Return the node of the train workers, once Ray has found them one."""
        while not (found := await asyncio.to_thread(node_ids, trainer)):
            await asyncio.sleep(LOOK_S)
        return found[0]

    async def reserve_teacher(self) -> PlacementGroup:
        """Wait as `reserve_replica` does. No weights travel to a teacher, so it may be on any machine."""
        return await self._reserve_bundle(self._teacher, None)

    async def _reserve_bundle(self, bundle: Resources, home: str | None) -> PlacementGroup:
        # Ray's own strategies spread the bundles of one group. A group per replica can end with it; hence the hint,
        # which Ray follows while that node has room.
        async with self._choosing:
            target = None if home else choose_node(await self._nodes(), bundle)
            asked = (target or "", bundle)
            self._asked.append(asked)
        only = [{"ray.io/node-id": home} if home else {}]
        bundles = [dict(bundle)]
        try:
            group = placement_group(bundles, "STRICT_PACK", _soft_target_node_id=target, bundle_label_selector=only)
            try:
                await group.ready()
            except BaseException:
                remove_placement_group(group)
                raise
        finally:
            self._asked.remove(asked)
        self._reserved.append((group, bundle))
        return group

    def remove(self) -> None:
        """Give everything back. Groups also end by themselves with the driver's connection to Ray."""
        for group, _ in self._every():
            remove_placement_group(group)

    def _every(self) -> list[tuple[PlacementGroup, Resources]]:
        """Return all reservations, each with what a bundle of it has."""
        return [*([] if self.trainer is None else [(self.trainer, self._rank)]), *self._reserved]

    async def _reserve_trainer(self) -> None:
        strategy = "STRICT_PACK" if self._is_on_one_machine else "PACK"
        self.trainer = placement_group([dict(self._rank)] * self._num_ranks, strategy)
        await self.trainer.ready()

    async def _reserve_replicas(self) -> None:
        # All at once: an autoscaler then knows how many machines to bring.
        self.replicas += await _all(self.reserve_replica, self._config.rollout.num_replicas)

    async def _reserve_teachers(self) -> None:
        self.teachers += await _all(self.reserve_teacher, self._num_teachers)

    async def _wait_for_agents(self) -> None:
        """Wait until the cluster has the CPUs of the agent workers, for which nothing is reserved, too."""
        agents = CPUS_PER_WORKER * self._config.rollout.num_agent_workers
        reserved = self._num_ranks * self._rank["CPU"] + sum(bundle["CPU"] for _, bundle in self._reserved)
        while ray.cluster_resources().get("CPU", 0) < agents + reserved:
            await asyncio.sleep(LOOK_S)

    async def _nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        held: dict[str, Counter[str]] = defaultdict(Counter)
        num_replicas: Counter[str] = Counter()
        for node_id, bundle in self._asked:
            held[node_id].update(bundle)  # pyright: ignore[reportArgumentType]
            num_replicas[node_id] += 1
        reserved = self._every()  # at the same moment: what is asked for becomes reserved meanwhile
        # In threads, which wait where the head does not answer.
        nodes = await asyncio.to_thread(ray.nodes)
        for group, bundle in reserved:
            for node_id in await asyncio.to_thread(node_ids, group):
                held[node_id].update(bundle)  # pyright: ignore[reportArgumentType]
                num_replicas[node_id] += group != self.trainer
        return [
            Node(
                node_id=node_id,
                free={name: node["Resources"].get(name, 0) - held[node_id][name] for name in ("CPU", "GPU")},
                num_replicas=num_replicas[node_id],
            )
            for node in nodes
            if node["Alive"] and (node_id := node["NodeID"])
        ]

    def _refuse_too_large(self) -> None:
        # In all, also what this run holds already.
        most = max((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
        if self._replica.get("GPU", 0) > most:
            rollout = self._config.rollout
            raise ConfigError(
                f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} x rollout.data_parallel_size="
                f"{rollout.data_parallel_size}: a replica's GPUs are on one node, and the largest has {most:g}"
            )
        if self._num_teachers and self._teacher.get("GPU", 0) > most:
            raise ConfigError(
                f"teacher.tensor_parallel_size={self._config.teacher.tensor_parallel_size}: the GPUs of a replica are "
                f"on one node, and the largest has {most:g}"
            )

    def shortage(self, why: str) -> str:
        """Return a sentence of what is to be reserved, why it says so, and what the nodes have."""
        config = self._config
        free = ray.available_resources()
        nodes = ", ".join(
            f"{node['NodeManagerHostname']} ({node['Resources'].get('GPU', 0):g} GPU, "
            f"{node['Resources'].get('CPU', 0):g} CPU)"
            for node in ray.nodes()
            if node["Alive"]
        )
        transport = config.weight_sync.transport.value
        nearby = f", all on one machine for weight_sync.transport={transport} (collective and filesystem need not)"
        teachers = f", teacher.num_replicas={self._num_teachers} with {_words(self._teacher)} each"
        agents = f", rollout.num_agent_workers={config.rollout.num_agent_workers} with {CPUS_PER_WORKER} CPU each"
        return (
            f"trainer.num_ranks={config.trainer.num_ranks} with {_words(self._rank)} each, rollout.num_replicas="
            f"{config.rollout.num_replicas} with {_words(self._replica)} each, on one node each"
            f"{nearby if self._is_on_one_machine else ''}{teachers if self._num_teachers else ''}{agents}: {why} "
            f"ray.placement_timeout_s={config.ray.placement_timeout_s:g}; free are {free.get('GPU', 0):g} GPU "
            f"and {free.get('CPU', 0):g} CPU of the nodes {nodes}"
        )


def num_teachers(config: Config) -> int:
    """Return how many replicas the teacher has: none where there is no teacher, and where nothing is trained."""
    return config.teacher.num_replicas if config.teacher.path is not None and config.trainer.num_ranks else 0


def node_ids(group: PlacementGroup) -> list[str]:
    """Return the nodes of a group, by bundle: none of a removed group, and fewer while Ray moves some of a lost
    node."""
    table = placement_group_table(group)
    nodes = {} if table["state"] == "REMOVED" else table["bundles_to_node_id"]
    return [nodes[index] for index in sorted(nodes) if nodes[index]]


async def _all(reserve: Callable[[], Coroutine[None, None, PlacementGroup]], count: int) -> list[PlacementGroup]:
    async with asyncio.TaskGroup() as tasks:
        reserving = [tasks.create_task(reserve()) for _ in range(count)]
    return [task.result() for task in reserving]


def _bundle(num_gpus: float) -> Resources:
    return {"CPU": 1, "GPU": num_gpus} if num_gpus else {"CPU": 1}


def _words(bundle: Resources) -> str:
    return " and ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
