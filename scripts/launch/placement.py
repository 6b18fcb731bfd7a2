"""What a run reserves of the cluster before any of its processes starts, with Ray's placement groups.

Train ranks are together: on one node if it has room, else on as few as possible. A replica's GPUs are on one node, and
replicas are on as many nodes as possible, so that one that is lost takes few of them along. A group ends with the
replica that it is for, or with the run.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
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

Resources = Mapping[str, float]
ON_ONE_MACHINE = (Transport.shared_memory, Transport.cuda_ipc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a node has, and what this run holds of it."""

    node_id: str
    free: Resources
    """What this run has not reserved. Others may have."""
    num_replicas: int

    def fits(self, bundle: Resources) -> bool:
        return all(self.free.get(resource, 0) >= amount for resource, amount in bundle.items())


async def reserve(config: Config, device: str) -> "Placement":
    """The reservations with which a run begins. See `Placement.reserve`."""
    placement = Placement(config, device)
    await placement.reserve()
    return placement


def choose_node(nodes: Sequence[Node], bundle: Resources) -> str | None:
    """The node for the next replica: the one with the fewest, of those the one with most to spare."""
    fitting = [node for node in nodes if node.fits(bundle)]
    if not fitting:
        return None
    spare = {node.node_id: (node.free.get("GPU", 0), node.free.get("CPU", 0)) for node in fitting}
    best = min(fitting, key=lambda node: (node.num_replicas, *(-amount for amount in spare[node.node_id])))
    return best.node_id


class Placement:
    """The reservations of a run.

    Example:
        placement = await reserve(config, "cuda")  # raises ConfigError when the cluster has no room
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
        self._is_on_one_machine = trainer.num_ranks > 0 and config.weight_sync.transport in ON_ONE_MACHINE
        self.trainer: PlacementGroup | None = None
        """A bundle per rank; None where nothing is trained."""
        self.replicas: list[PlacementGroup] = []
        """One for each replica that the run begins with, of one bundle."""
        self.teachers: list[PlacementGroup] = []
        """One for each replica of the teacher that the run begins with."""
        self._of_replicas: list[tuple[PlacementGroup, Resources]] = []
        """Of all replicas until now, the teacher's too and those that are gone."""

    async def reserve(self) -> None:
        """Raises ConfigError where a replica fits on no node, or after ray.placement_timeout_s."""
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
            reserved = True
        except TimeoutError as error:
            raise ConfigError(self._no_room()) from error
        finally:
            if not reserved:
                self.remove()

    async def reserve_replica(self) -> PlacementGroup:
        """Waits without a deadline until there is room, maybe because a node joins. Spreads replicas, unless weights
        travel within one machine: then on that of the train workers."""
        home = next(iter(node_ids(self.trainer)), None) if self._is_on_one_machine and self.trainer else None
        return await self._reserve_one(self._replica, home)

    async def reserve_teacher(self) -> PlacementGroup:
        """Waits as `reserve_replica` does. No weights travel to a teacher, so it may be on any machine."""
        return await self._reserve_one(self._teacher, None)

    async def _reserve_one(self, bundle: Resources, home: str | None) -> PlacementGroup:
        # Ray's own strategies spread the bundles of one group. A group per replica can end with it; hence the hint,
        # which Ray follows while that node has room.
        target = None if home else choose_node(self._nodes(), bundle)
        only = [{"ray.io/node-id": home} if home else {}]
        bundles = [dict(bundle)]
        group = placement_group(bundles, "STRICT_PACK", _soft_target_node_id=target, bundle_label_selector=only)
        try:
            await group.ready()
        except BaseException:
            remove_placement_group(group)
            raise
        self._of_replicas.append((group, bundle))
        return group

    def remove(self) -> None:
        """Also without this, groups end with the driver's connection to Ray."""
        for group in self._groups():
            remove_placement_group(group)

    def _groups(self) -> list[PlacementGroup]:
        return [*([] if self.trainer is None else [self.trainer]), *(group for group, _ in self._of_replicas)]

    async def _reserve_trainer(self) -> None:
        strategy = "STRICT_PACK" if self._is_on_one_machine else "PACK"
        self.trainer = placement_group([dict(self._rank)] * self._num_ranks, strategy)
        await self.trainer.ready()

    async def _reserve_replicas(self) -> None:
        for _ in range(self._config.rollout.num_replicas):
            self.replicas.append(await self.reserve_replica())

    async def _reserve_teachers(self) -> None:
        for _ in range(self._num_teachers):
            self.teachers.append(await self.reserve_teacher())

    def _nodes(self) -> list[Node]:
        """Those that are alive."""
        held: dict[str, Counter[str]] = defaultdict(Counter)
        num_replicas: Counter[str] = Counter()
        of_trainer = [] if self.trainer is None else [(self.trainer, self._rank)]
        for group, bundle in [*of_trainer, *self._of_replicas]:
            for node_id in node_ids(group):
                held[node_id].update(bundle)  # pyright: ignore[reportArgumentType]
                num_replicas[node_id] += group != self.trainer
        return [
            Node(
                node_id=node_id,
                free={name: node["Resources"].get(name, 0) - held[node_id][name] for name in ("CPU", "GPU")},
                num_replicas=num_replicas[node_id],
            )
            for node in ray.nodes()
            if node["Alive"] and (node_id := node["NodeID"])
        ]

    def _refuse_too_large(self) -> None:
        most = max((node.free["GPU"] for node in self._nodes()), default=0)
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

    def _no_room(self) -> str:
        config = self._config
        free = ray.available_resources()
        nodes = ", ".join(
            f"{node['NodeManagerHostname']} ({node['Resources'].get('GPU', 0):g} GPU, "
            f"{node['Resources'].get('CPU', 0):g} CPU)"
            for node in ray.nodes()
            if node["Alive"]
        )
        transport = config.weight_sync.transport.value
        within_one = f", all on one machine for weight_sync.transport={transport} (collective and filesystem need not)"
        others = f", teacher.num_replicas={self._num_teachers} with {_words(self._teacher)} each"
        return (
            f"trainer.num_ranks={config.trainer.num_ranks} with {_words(self._rank)} each, rollout.num_replicas="
            f"{config.rollout.num_replicas} with {_words(self._replica)} each, on one node each"
            f"{within_one if self._is_on_one_machine else ''}{others if self._num_teachers else ''}: Ray found no room "
            f"within ray.placement_timeout_s={config.ray.placement_timeout_s:g}; free are {free.get('GPU', 0):g} GPU "
            f"and {free.get('CPU', 0):g} CPU of the nodes {nodes}"
        )


def num_teachers(config: Config) -> int:
    """Replicas of the teacher; none where there is no teacher, and where nothing is trained."""
    return config.teacher.num_replicas if config.teacher.path is not None and config.trainer.num_ranks else 0


def node_ids(group: PlacementGroup) -> list[str]:
    """By bundle; none of a removed group, and fewer while Ray moves some because a node was lost."""
    table = placement_group_table(group)
    of_bundle = {} if table["state"] == "REMOVED" else table["bundles_to_node_id"]
    return [of_bundle[index] for index in sorted(of_bundle) if of_bundle[index]]


def _bundle(num_gpus: float) -> Resources:
    return {"CPU": 1, "GPU": num_gpus} if num_gpus else {"CPU": 1}


def _words(bundle: Resources) -> str:
    return " and ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
