"""The border of weight sync: what crosses it, and what a trainer, a transport and a replica offer to it.

The values are plain and picklable, since they travel through Ray and on to an engine's workers. Nothing here needs
torch, so that the driver can import it.
"""

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Checksums = tuple[int, ...]
"""One per tensor, over the bytes of one trainer rank's rows."""
TensorSpec = tuple[str, "torch.dtype", Sequence[int]]
"""(name, dtype, shape) of a whole tensor, under its Hugging Face name and in the dtype that replicas take."""
NamedTensors = Iterator[tuple[str, "torch.Tensor"]]
Shards = Callable[[], NamedTensors]
"""Yields (name, this rank's rows) of every tensor, in the order of the specs and in their dtypes."""
Load = Callable[[NamedTensors], None]
"""Takes (name, whole tensor), each valid until the next is asked for."""


class WeightUpdateError(RuntimeError):
    """Weights could not be brought somewhere. The message names replica, phase and reason."""


def require_version(global_steps: object) -> None:
    """Raise ValueError for what no version is called by: a version is the number of steps that were taken."""
    if not isinstance(global_steps, Integral) or isinstance(global_steps, bool) or global_steps < 0:
        raise ValueError(f"global_steps={global_steps!r}: must be a whole number, the steps that were taken")


# -- what is published -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOrder:
    """The checkpoint manager's order to every trainer rank."""

    global_steps: int
    receivers: Mapping[str, int]
    """Name of each replica that is going to receive -> number of its workers."""
    base: int | None
    """The version that all receivers are known to hold; None if they hold no common one."""
    nonce: str
    """New for each publication: one version may be published twice."""
    timeout_s: float
    """The seconds for which members of a transfer wait for one another."""
    has_new: bool = True
    """True when a receiver is not known to hold any version: what never changes is then sent to all, too."""


@dataclass(frozen=True)  # a large model has many, and those with slots pickle three times as slowly
class TensorEntry:
    """A tensor's place in a string of bytes (transports/byte_layout.py)."""

    name: str
    dtype: str
    """The name of the type in torch, such as "bfloat16"."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Says that a version is an adapter, which receivers merge into weights that never change (adapter.py)."""

    scale: float
    base: int
    """Checksum of the weights that it is for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """A description of what trainer ranks have published of one version: one rank's part, or all. Tuples are by
    rank."""

    transport: str
    global_steps: int
    nbytes: int
    """The number of bytes that these ranks have to send."""
    tensors: tuple[TensorEntry, ...]
    """The whole tensors: the same on every rank."""
    locations: tuple[Any, ...]
    """The way to each rank's bytes, as the transport says it."""
    checksums: tuple[Checksums, ...] | None
    """None where they are known only once the bytes have been sent."""
    adapter: Adapter | None = None
    """Set when `tensors` are factors, besides the weights that they are for if a receiver is new."""
    constants: tuple[str, ...] = ()
    """Names of what the trainer's model has besides and never trains: it is no part of any version."""
    trained: str = ""
    """A digest of the trained weights, from the weights themselves and not from what is published; empty where there is
    none."""

    @property
    def num_ranks(self) -> int:
        return len(self.locations)

    @cached_property
    def checksum(self) -> int | None:
        """All checksums in one."""
        return None if self.checksums is None else combine(self.checksums)


def merge(parts: Sequence[Manifest]) -> Manifest:
    """Return the manifest of a version, from every rank's part."""
    checksums = [rank_checksums for part in parts for rank_checksums in part.checksums or ()]
    return replace(
        parts[0],
        nbytes=sum(part.nbytes for part in parts),
        locations=tuple(location for part in parts for location in part.locations),
        checksums=tuple(checksums) if len(checksums) == len(parts) else None,
    )


def combine(checksums: Sequence[Sequence[int]]) -> int:
    """Return one checksum of a version, from those of every rank."""
    values = [value for rank_checksums in checksums for value in rank_checksums]
    return zlib.crc32(struct.pack(f"<{len(values)}I", *values))


# -- what becomes of it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivingWorker:
    replica: str
    index: int
    """Its place among the replica's workers."""
    device: str
    """The device of its parameters, such as "cuda:0"."""


@dataclass(frozen=True, slots=True)
class WeightTag:
    """Identifies weights: their version, and `combine` of the checksums of their bytes."""

    global_steps: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport:
    """Seconds of one replica's pause, by its own clock."""

    pause_s: float
    """Seconds from the order to stop to the order to continue. 0 when a client keeps the replica paused."""
    swap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    name: str
    global_steps: int
    """Tag of the weights it serves; -1 before the first update."""
    pause_mode: str | None
    """The mode that a client paused it in."""
    torn: bool
    """Frozen by an update that failed half-way, until another one is whole."""
    frozen: bool
    """No token moves: it is paused or torn, or in an update, or could not be resumed after one."""
    is_paused: bool
    """New requests wait: a pause was ordered, complete or not, or the weights are torn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUpdate:
    """One replica's update: what it verified, and the seconds that each phase took."""

    name: str
    tag: WeightTag
    """The weights that it serves now. It has found their checksum to be the trainer's."""
    stage_s: float
    pause_s: float
    swap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One update of the fleet."""

    global_steps: int
    nbytes: int
    publish_s: float
    total_s: float
    replicas: tuple[ReplicaUpdate, ...]
    """The replicas that were brought to it."""
    failures: int
    """Attempts that failed, on any replica."""

    def gauges(self) -> dict[str, float]:
        """Metrics of the slowest replica, in milliseconds; 0 if all replicas were lost, none if nobody needed it."""
        if not (self.replicas or self.failures):
            return {}
        return {
            "weight_sync/pause_ms": 1e3 * max((update.pause_s for update in self.replicas), default=0.0),
            "weight_sync/swap_ms": 1e3 * max((update.swap_s for update in self.replicas), default=0.0),
            "weight_sync/stage_ms": 1e3 * max((update.stage_s for update in self.replicas), default=0.0),
            "weight_sync/publish_ms": 1e3 * self.publish_s,
            "weight_sync/total_ms": 1e3 * self.total_s,
            "weight_sync/megabytes": self.nbytes / 1e6,
            "weight_sync/failures": float(self.failures),
        }


# -- who takes part ----------------------------------------------------------------------------------------------------


class WeightSource(Protocol):
    """The trainer. What it has published can be read until it publishes again."""

    @property
    def global_steps(self) -> int:
        """The version of the present weights."""
        ...

    async def publish(self, order: PublishOrder) -> Manifest: ...

    async def send(self, manifest: Manifest) -> int:
        """Moves the bytes while the replicas receive, and returns their checksum. A cancellation ends the transfer on
        both sides."""
        ...


class WeightTarget(Protocol):
    """A replica. Each call leaves it on one whole version, or torn and out of service; never merely paused."""

    @property
    def name(self) -> str: ...

    @property
    def num_workers(self) -> int: ...

    async def stage(self, manifest: Manifest) -> None:
        """Receives the weights into staging memory, while generating. Raises when they are not what was sent."""

    async def commit(self, tag: WeightTag) -> CommitReport:
        """Pauses, makes the staged weights of this tag live, verifies them, resumes. It runs to its end even when the
        caller is gone."""
        ...

    async def receive(self, manifest: Manifest) -> CommitReport:
        """Like `commit`, but receives the weights while paused, straight into the live ones (staging=none)."""
        ...

    async def status(self) -> ReplicaStatus: ...


class UpdatedFleet(Protocol):
    """The owner of the replicas' records. The checkpoint manager reads them, and asks the fleet to change them."""

    @property
    def held_versions(self) -> Mapping[str, int]:
        """Replica -> the tag of the weights that it is known to hold now, dead ones included. One of which nobody knows
        is left out."""
        ...

    @property
    def targets(self) -> Sequence[WeightTarget]:
        """The replicas that take part in updates, in service or not."""
        ...

    def update_under_way(self) -> AbstractContextManager[None]:
        """Count the present targets as in service, even ejected ones, because the update may bring them back."""
        ...

    def mark_unverified(self, names: Collection[str]) -> None:
        """Note that nobody knows any more which weights these replicas hold."""

    def silence(self, name: str) -> str | None:
        """Return the reason why an update goes on without the replica, if others answer; None while it answers."""

    def count_miss(self, name: str) -> int:
        """Note that an update did not reach the replica. Returns how many in a row did not."""
        ...

    async def admit(self, name: str, global_steps: int) -> None:
        """Note that the replica holds the version that was just verified, and route to it. Idempotent."""

    async def eject(self, name: str, error: BaseException) -> None:
        """Route nothing more to the replica for now. It completes what it is doing."""

    async def give_up(self, name: str, error: BaseException) -> None:
        """End a replica that does not answer, stays frozen, or is not known to hold whole weights."""

    def has_enough(self) -> bool:
        """Return whether as many replicas are in service now as the run needs."""
        ...

    def require_enough(self, cause: BaseException) -> None:
        """Raise if fewer replicas are in service than the run needs."""


class Sender(ABC):
    """A transport's half in a trainer rank. Some only publish: their bytes lie ready, and their checksums are known."""

    @abstractmethod
    def publish(self, specs: Sequence[TensorSpec], shards: Shards, order: PublishOrder) -> Manifest:
        """Offers this rank's rows. They can be reached once every rank has returned."""

    def send(self, shards: Shards, manifest: Manifest) -> Checksums:
        """Moves the bytes, if the manifest has no checksums yet. Returns those of this rank's rows."""
        raise AssertionError(f"{manifest.transport} has nothing to send")

    def stop(self, manifest: Manifest) -> None:  # noqa: B027 - most have nothing to stop
        """Called from another thread when a replica is gone: lets a `send` fail, on this side and at the receivers."""


class Receiver(ABC):
    """A transport's half in a worker of a replica."""

    @abstractmethod
    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        """Calls `load` once with all that came, and returns every rank's verified checksums. RuntimeError if what came
        is not what was sent, which may show only after `load` has returned."""
