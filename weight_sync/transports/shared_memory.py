"""Weights through a file in shared memory: one host, any device. Every worker of every replica reads it in place."""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from weight_sync.protocol import Checksums, Load, Manifest, PublishOrder, Receiver, ReceivingWorker, TensorEntry
from weight_sync.transports.byte_layout import length, rank_part, read
from weight_sync.transports.checksums import checksum, load_verified
from weight_sync.transports.cleanup import shared_path
from weight_sync.transports.locations import SharedFile, this_machine
from weight_sync.transports.sender import RankSender, Rows


class SharedMemorySender(RankSender):
    """Every rank writes its own rows into one file, so nothing is gathered. The file serves the next version too, under
    another name: a replica that still reads then finds checksums that do not match."""

    transport = "shared_memory"

    def __init__(self, owner: str, rank: int, num_ranks: int):
        """`owner` is a part of the file's name, by which `release_all` finds what a crash left."""
        super().__init__(rank, num_ranks)
        self._owner = owner
        self._path: Path | None = None
        self._lock: int | None = None
        """File descriptor that holds the shared lock."""

    def _offer(
        self, entries: Sequence[TensorEntry], rows: Rows, order: PublishOrder
    ) -> tuple[SharedFile, Sequence[int]]:
        nbytes = max(length(entries), 1)  # nothing cannot be mapped
        path = shared_path(self._owner, order.global_steps, order.nonce)
        if self._path is None or len(self._buffer) < nbytes:
            self._remove_file()
            self._buffer, self._lock = _allocate(path, nbytes)
        elif self._rank == 0:
            self._path.rename(path)
        self._path = path
        return SharedFile(this_machine(), str(path)), self._write(entries, rows)

    def _write(self, entries: Sequence[TensorEntry], rows: Rows) -> list[int]:
        checksums = []
        for entry, (_, tensor) in zip(entries, rows, strict=True):
            start, end = rank_part(entry, self._rank, self._num_ranks)
            place = self._buffer[start:end]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            checksums.append(checksum(place))
        return checksums

    def _remove_file(self) -> None:
        """Remove the file. Mappings that are still open stay valid."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
        self._path = self._lock = None


class SharedMemoryReceiver(Receiver):
    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        """Loads views of the file. Raises RuntimeError on another host."""
        hosts = {file.host for file in manifest.locations} | {this_machine()}
        if len(hosts) > 1:
            raise RuntimeError(
                f"weight_sync.transport=shared_memory needs replicas and trainer on one machine, they are on "
                f"{', '.join(sorted(hosts))}: collective and filesystem work there"
            )
        path, nbytes = manifest.locations[0].path, max(length(manifest.tensors), 1)
        # shared=False maps it privately: a reader cannot write into the weights of others.
        mapped = torch.from_file(path, shared=False, size=nbytes, dtype=torch.uint8)
        return load_verified(read([mapped], manifest.tensors), manifest, load)


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
        why = f"{path.parent} has no room for {nbytes / 1e6:.1f} MB of weights: {error}"
        raise RuntimeError(
            f"weight_sync.transport=shared_memory: {why}; collective and filesystem need none"
        ) from error
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8), descriptor
