"""Weights through a file in shared memory: one host, any device. Every worker of every replica reads it in place."""

import fcntl
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from weight_sync.protocol import (
    Checksums,
    Load,
    Manifest,
    Publication,
    PublishOrder,
    Receiver,
    ReceivingWorker,
    Sender,
    Shards,
    SharedFile,
    TensorEntry,
    TensorSpec,
)
from weight_sync.transports import byte_layout
from weight_sync.transports.checksums import copy_with_checksum, load_verified
from weight_sync.transports.cleanup import shared_path


class SharedMemorySender(Sender):
    """Every rank writes its own rows into one file, so nothing is gathered. The file serves the next version too, under
    another name: a replica that still reads then finds checksums that do not match."""

    def __init__(self, owner: str, rank: int, num_ranks: int):
        """`owner` is a part of the file's name, by which `release_all` finds what a crash left."""
        self._owner, self._rank, self._num_ranks = owner, rank, num_ranks
        self._path: Path | None = None
        self._lock: int | None = None
        """File descriptor that holds the shared lock."""

    def publish(self, specs: Sequence[TensorSpec], shards: Shards, order: PublishOrder) -> Publication:
        entries, nbytes = byte_layout.layout(specs)
        path = shared_path(self._owner, order.global_steps, order.nonce)
        if self._path is None or len(self._buffer) < nbytes:
            self._remove_file()
            self._buffer, self._lock = _allocate(path, nbytes)
        elif self._rank == 0:
            self._path.rename(path)
        self._path = path
        return Publication(
            transport="shared_memory",
            global_steps=order.global_steps,
            nbytes=sum(entry.nbytes for entry in byte_layout.rank_layout(entries, self._rank, self._num_ranks)),
            tensors=entries,
            location=SharedFile(host=socket.gethostname(), path=str(path), nbytes=nbytes),
            checksums=write(self._buffer, entries, shards(), self._rank, self._num_ranks),
        )

    def _remove_file(self) -> None:
        """Mappings that are still open stay valid."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
        self._path = self._lock = None


class SharedMemoryReceiver(Receiver):
    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        """Loads views of the file. Raises RuntimeError on another host."""
        files = manifest.located(SharedFile)
        hosts = {file.host for file in files} | {socket.gethostname()}
        if len(hosts) > 1:
            raise RuntimeError(
                f"weight_sync.transport=shared_memory needs replicas and trainer on one machine, they are on "
                f"{', '.join(sorted(hosts))}: collective and filesystem work there"
            )
        # shared=False maps it privately: a reader cannot write into the weights of others.
        mapped = torch.from_file(files[0].path, shared=False, size=files[0].nbytes, dtype=torch.uint8)
        return load_verified(byte_layout.read([mapped], manifest.tensors), manifest, load)


def write(
    buffer: torch.Tensor,
    entries: Sequence[TensorEntry],
    tensors: Iterable[tuple[str, torch.Tensor]],
    rank: int,
    num_ranks: int,
) -> Checksums:
    """Copies a rank's rows of every tensor to their places in the flat uint8 buffer. Returns their checksums."""
    checksums = []
    own = byte_layout.rank_layout(entries, rank, num_ranks)
    for entry, (_, tensor) in zip(entries, byte_layout.checked(tensors, own), strict=True):
        start, end = byte_layout.part_of(entry, rank, num_ranks)
        checksums.append(copy_with_checksum(buffer[start:end], tensor))
    return tuple(checksums)


def _allocate(path: Path, nbytes: int) -> tuple[torch.Tensor, int]:
    """The file, mapped, and the descriptor that locks it (see cleanup.py). Its memory is claimed here, because writing
    where none is left would end the process by SIGBUS."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise RuntimeError(f"{path.parent} has no room for {nbytes / 1e6:.1f} MB of weights: {error}") from error
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8), descriptor
