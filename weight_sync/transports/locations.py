"""The places of each transport's bytes: the `locations` of its manifests.

Nothing here needs torch, because manifests pass through the driver.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.runtime.network import own_address
from weight_sync.protocol import Checksums, Manifest


def this_machine() -> str:
    """Return the name of this machine with its address: containers on two machines may have one name."""
    return f"{socket.gethostname()} ({own_address()})"


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Holds the rows of all ranks."""

    host: str
    path: str


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory that one rank exports, as plain values. It must live for as long as they are used."""

    host: str
    handles: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The store, served by trainer rank 0, at which the members of a transfer meet."""

    host: str
    port: int
    nonce: str
    timeout_s: float
    bucket_bytes: int
    members: tuple[str, ...]
    """Names by rank in the group, for error messages."""
    first_rank: Mapping[str, int]
    """Replica -> rank of its first worker."""


@dataclass(frozen=True, slots=True)
class VllmMeeting:
    """The store at which trainer ranks call vLLM's half in the workers."""

    meeting: Meeting
    port: int
    """A free port of rank 0's machine, for a backend that connects its members by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The part of one rank's rows that is sent, by another transport."""

    base: int | None
    """The version that they are changes of; None: all rows are sent."""
    encoding: tuple[tuple[int, str], ...]
    """(index of a tensor, "sparse" or "whole"), in the order in which they are sent."""
    inner: Manifest
    checksums: Checksums
    """The checksums of all rows, after the changes."""
