"""What a trainer offers and what a replica takes. Weight sync knows no more of either."""

import struct
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

Manifest = dict[str, Any]
"""Describes published weights. Plain values, because it crosses processes:

    transport      name of the transport
    global_steps   the version
    nbytes         length of the string of bytes (transports/byte_layout.py); of a delta, what all ranks have to send
    tensors        [name, dtype, shape, offset, nbytes] of each
    num_ranks      trainer ranks, each of which sends its part of every tensor
    locations      per rank, what the transport needs to reach its bytes
    checksums      per rank, of its part of each tensor. A transport that sends while replicas receive tells them last.
    checksum       all of them in one; likewise

What a worker gets has these besides: `replica`, its name; `worker`, the place among the replica's workers; `device`.
"""


def merge(parts: Sequence[Manifest]) -> Manifest:
    """The manifest of a version, from what every rank published, by rank."""
    manifest = parts[0] | {"locations": [part["location"] for part in parts]}
    del manifest["location"]
    if manifest["transport"] == "delta":  # ranks have strings of their own; else each says the length of the whole
        manifest["nbytes"] = sum(part["nbytes"] for part in parts)
    if "checksums" in manifest:
        manifest["checksums"] = [part["checksums"] for part in parts]
    return manifest


def combine(checksums: Sequence[Sequence[int]]) -> int:
    """One checksum of a version, from those of every rank's parts."""
    values = [value for of_rank in checksums for value in of_rank]
    return zlib.crc32(struct.pack(f"<{len(values)}I", *values))


class Tag(Protocol):
    """What one worker of a replica says of the weights it serves."""

    @property
    def global_steps(self) -> int: ...

    @property
    def checksum(self) -> int: ...


class WeightSource(Protocol):
    """The trainer. What it publishes can be read until it publishes again."""

    @property
    def global_steps(self) -> int:
        """Optimizer steps that it has taken: the version of its present weights."""
        ...

    async def publish(self, global_steps: int, receivers: dict[str, int], base: int | None) -> Manifest:
        """The present weights, tagged `global_steps`. `receivers`: the number of workers of every replica that is going
        to receive. `base`: the version that all of them hold, if it is one."""
        ...

    async def send(self, manifest: Manifest) -> int:
        """Move the bytes, beside the replicas' receiving. The checksum of what was sent. Cancelled, it ends on both
        sides."""
        ...


class WeightTarget(Protocol):
    """A replica. Each call leaves it on one whole version, or torn and out of service; never merely paused."""

    @property
    def name(self) -> str: ...

    @property
    def num_workers(self) -> int: ...

    async def stage(self, manifest: Manifest) -> None:
        """Take the weights in beside the live ones, while generating. Raises when they are not what was sent."""
        ...

    async def commit(self, manifest: Manifest) -> "CommitReport":
        """Pause, make the staged weights live (with staging=none: receive them), verify, resume: the replica's own
        transaction, which ends whatever becomes of the caller. Of weights that are staged, `manifest` has no more than
        `global_steps` and `checksum`."""
        ...

    async def status(self) -> "TargetStatus": ...


class CommitReport(Protocol):
    @property
    def pause_s(self) -> float:
        """How long the replica was frozen, by its own clock: from the order to stop to the order to go on."""
        ...

    @property
    def swap_s(self) -> float: ...


class TargetStatus(Protocol):
    @property
    def global_steps(self) -> int:
        """The version it serves."""
        ...

    @property
    def torn(self) -> bool:
        """Frozen, because an update failed half-way."""
        ...

    @property
    def frozen(self) -> bool:
        """It generates nothing."""
        ...

    @property
    def pause_mode(self) -> str | None:
        """The mode that a client paused it in."""
        ...
