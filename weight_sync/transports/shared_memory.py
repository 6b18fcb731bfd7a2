"""Weights through a file in shared memory: one host, any device. Every worker of every replica reads it in place.

Such a file has a model's size and outlives its writers, so each of them holds a shared lock on it while it lives: one
that nobody has locked is what a killed run left (`sweep`). The kernel keeps these locks, so they count between
containers that share the folder, too, where process ids say nothing.
"""

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weight_sync.protocol import (
    Checksums,
    Manifest,
    NamedTensors,
    Publication,
    PublishOrder,
    ReceivingWorker,
    Shards,
    SharedFile,
    TensorEntry,
    TensorSpec,
)

if TYPE_CHECKING:  # the driver, which only removes files, does without torch
    import torch


DIRECTORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
FILE_NAME = r"slipstream-{owner}--?\d+-[0-9a-f]+"
MIN_AGE_S = 60.0
"""Younger files are not swept: they may lie between their creation and their lock."""


class SharedMemorySender:
    """Every rank writes its own rows into one file, so nothing is gathered. The file is used again for the next
    version, under another name: a replica that still reads then finds checksums that do not match."""

    def __init__(self, owner: str, rank: int, num_ranks: int):
        """`owner`: part of the file's name, by which `release_all` finds what a crash left."""
        self._owner, self._rank, self._num_ranks = owner, rank, num_ranks
        self._path: Path | None = None
        self._lock: int | None = None
        """File descriptor that holds the shared lock."""

    def publish(self, specs: Sequence[TensorSpec], shards: Shards, order: PublishOrder) -> Publication:
        from weight_sync.transports import byte_layout

        entries, nbytes = byte_layout.layout(specs)
        path = DIRECTORY / f"slipstream-{self._owner}-{order.global_steps}-{order.nonce}"
        if self._path is None or len(self._buffer) < nbytes:
            self._remove_file()
            self._buffer, self._lock = _allocate(path, nbytes)
        elif self._rank == 0:
            self._path.rename(path)
        self._path = path
        checksums = write(self._buffer, entries, shards(), self._rank, self._num_ranks)
        return Publication(
            transport="shared_memory",
            global_steps=order.global_steps,
            nbytes=byte_layout.total_bytes(byte_layout.rank_layout(entries, self._rank, self._num_ranks)),
            tensors=entries,
            location=SharedFile(host=socket.gethostname(), path=str(path), nbytes=nbytes),
            checksums=checksums,
        )

    def send(self, shards: Shards, manifest: Manifest) -> Checksums:
        assert manifest.checksums is not None
        return manifest.checksums[self._rank]

    def stop(self, manifest: Manifest) -> None:
        """Nobody waits for anybody."""

    def _remove_file(self) -> None:
        """Mappings that are still open stay valid."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
        self._path = self._lock = None


class SharedMemoryReceiver:
    def receive(
        self, manifest: Manifest, worker: ReceivingWorker, load: Callable[[NamedTensors], None]
    ) -> tuple[Checksums, ...]:
        """Loads views of the file. Raises RuntimeError on another host."""
        import torch

        from weight_sync.transports import byte_layout
        from weight_sync.transports.checksums import load_verified

        locations = manifest.located(SharedFile)
        hosts = {location.host for location in locations} | {socket.gethostname()}
        if len(hosts) > 1:
            raise RuntimeError(
                f"weight_sync.transport=shared_memory needs replicas and trainer on one machine, they are on "
                f"{', '.join(sorted(hosts))}: collective and filesystem work there"
            )
        # shared=False maps it privately: a reader cannot write into the weights of others.
        mapped = torch.from_file(locations[0].path, shared=False, size=locations[0].nbytes, dtype=torch.uint8)
        return load_verified(byte_layout.read([mapped], manifest.tensors), manifest, load)


def write(
    buffer: "torch.Tensor",
    entries: Sequence[TensorEntry],
    tensors: "Iterable[tuple[str, torch.Tensor]]",
    rank: int,
    num_ranks: int,
) -> Checksums:
    """Copies a rank's rows of every tensor to their places in the flat uint8 buffer. Returns their checksums."""
    from weight_sync.transports import byte_layout
    from weight_sync.transports.checksums import copy_with_checksum

    own = byte_layout.rank_layout(entries, rank, num_ranks)
    checksums = []
    for entry, (_, tensor) in zip(entries, byte_layout.checked(tensors, own), strict=True):
        start, end = byte_layout.part_of(entry, rank, num_ranks)
        checksums.append(copy_with_checksum(buffer[start:end], tensor))
    return tuple(checksums)


def _allocate(path: Path, nbytes: int) -> "tuple[torch.Tensor, int]":
    """The file, mapped, and the descriptor that locks it. Its memory is claimed here: to write where none is left would
    end the process by SIGBUS."""
    import torch

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise RuntimeError(f"{path.parent} has no room for {nbytes / 1e6:.1f} MB of weights: {error}") from error
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8), descriptor


def release_all(owner: str) -> None:
    """Remove every file of `owner`."""
    for path in _files(re.escape(owner)):
        path.unlink(missing_ok=True)


def sweep() -> None:
    """Remove what runs that were killed have left, whoever they were. Who has mapped such a file keeps the mapping."""
    for path in _files(".+"):
        with contextlib.suppress(OSError):  # another user's; or another run swept it first
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if time.time() - os.fstat(descriptor).st_mtime > MIN_AGE_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody publishes it
                    path.unlink()
            finally:
                os.close(descriptor)


def _files(owner: str) -> list[Path]:
    """`owner`: a regular expression."""
    name = re.compile(FILE_NAME.format(owner=owner))  # whole: "<owner>" is not the owner of "<owner>-2"'s
    return [path for path in DIRECTORY.glob("slipstream-*") if name.fullmatch(path.name)]
