"""Starts the replicas of one fleet: those that a run begins with, and those that join it later."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray.util.placement_group import PlacementGroup, remove_placement_group

from configs.runtime.deadline import within
from configs.schema import Config
from rollout.actors.supervisor import placed
from rollout.engines.base import EngineSpec
from rollout.events.event import Emit, nobody
from rollout.events.kinds import FleetEvent, FleetEventKind, Report
from rollout.fleet.fleet import POLICY, FleetKind
from rollout.replica.replica_group import ReplicaActor, ReplicaHandle, create_replica


async def _reserve_nothing() -> None:
    """Leave it to Ray where a replica is placed."""


@dataclass(kw_only=True)
class ReplicaStarter:
    """Knows how the replicas of one fleet are created and loaded, whether it is the policy's or the teacher's.

    Example:
        replicas = starter.create_first(placement.replicas)
        await asyncio.gather(*map(starter.load, replicas))
        another = await starter.start("replica-7")  # of a run that is under way
    """

    config: Config
    spec: EngineSpec
    on_start: Callable[[str], Callable[[], None]]
    """`on_start(name)` is what the process of a replica runs first: it says where its output goes."""
    report: Report
    """Takes a sentence on each event in the life of a replica that joins later."""
    kind: FleetKind = POLICY
    reserve: Callable[[], Awaitable[PlacementGroup | None]] = _reserve_nothing
    """Waits for room for one more replica."""
    loaded_version: int | None = None
    """The version of the weights that a replica loads; None when they are to be replaced by an update."""
    actor_class: type[ReplicaActor] = ReplicaActor
    recorded_in: Path | None = None
    """The run folder for the record of what replicas sample."""
    tells_events: bool = False
    emit: Emit = nobody
    connect: Callable[[ReplicaHandle], object] = lambda replica: None
    """Makes a replica that joins later known to those who ask it."""

    def create_first(self, groups: Sequence[PlacementGroup]) -> list[ReplicaHandle]:
        """Create one actor for each reservation. Their engines are not loaded yet."""
        return [self._create(f"{self.kind.name}-{index}", group) for index, group in enumerate(groups)]

    def _create(self, name: str, group: PlacementGroup | None) -> ReplicaHandle:
        return create_replica(
            name,
            self.spec,
            self.on_start,
            actor_class=self.actor_class,
            group=group,
            recorded_in=self.recorded_in,
            tells_events=self.tells_events,
        )

    async def load(self, replica: ReplicaHandle) -> None:
        """Return when its engine runs. Raises ConfigError where the run's updates could not reach its weights."""
        await replica.placed()
        assert replica.place is not None
        self.emit(replica.place.started(replica.name))
        await replica.start(self.spec, self.config.weight_sync)
        if self.loaded_version is None:
            await replica.require_updatable()
        else:
            await replica.tag_loaded(self.loaded_version)

    async def start(self, name: str) -> ReplicaHandle:
        """Start a replica that joins a running run: a replacement of a lost one, or one that an operator asks for.

        Waits without a deadline until Ray has placed the actor, because a node may have to join first."""

        def tell(text: str) -> None:
            self.report(FleetEvent(FleetEventKind.STARTING, name, f"{name} {text}"))

        async def create() -> ReplicaHandle:
            group = await self.reserve()
            try:
                return self._create(name, group)
            except BaseException:  # a folder that takes no record, for example
                if group is not None:
                    remove_placement_group(group)
                raise

        replica = await placed(create, ReplicaHandle.placed, ReplicaHandle.kill, tell)
        try:
            tell(f"starts on {replica.node}")
            async with within(self.config.rollout.start_timeout_s, "rollout.start_timeout_s", f"starting {name}"):
                await self.load(replica)
                self.connect(replica)
        except BaseException:
            replica.kill()
            raise
        return replica
