"""Weights through a folder that trainer and replicas share: safetensors files, any cluster, nothing but a file system.

Every rank writes its own rows into `<directory>/<owner>/v<global_steps>-<nonce>/rank_<rank>of<num_ranks>.safetensors`.
"""

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weight_sync.protocol import (
    Checksums,
    Load,
    Manifest,
    NamedTensors,
    PublishOrder,
    Receiver,
    ReceivingWorker,
    TensorEntry,
)
from weight_sync.transports.byte_layout import join
from weight_sync.transports.checksums import checksum, load_verified
from weight_sync.transports.sender import RankSender, Rows


class FilesystemSender(RankSender):
    """Keeps the version published last. A reader that has mapped the one before keeps its mapping."""

    transport = "filesystem"

    def __init__(self, owner: str, rank: int, num_ranks: int, directory: Path):
        super().__init__(rank, num_ranks)
        self._folder = directory / owner
        self._files: list[Path] = []

    def _offer(self, entries: Sequence[TensorEntry], rows: Rows, order: PublishOrder) -> tuple[Path, Sequence[int]]:
        version = self._folder / f"v{order.global_steps}-{order.nonce}"
        try:
            version.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeError(f"weight_sync.directory={self._folder.parent}: cannot be written: {error}") from error
        self._files.append(version / f"rank_{self._rank}of{self._num_ranks}.safetensors")
        tensors = {entry.name: tensor.contiguous().cpu() for entry, tensor in rows}
        save_file(tensors, self._files[-1])
        while len(self._files) > 1:
            before = self._files.pop(0)
            before.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another rank's file is still in the folder
                before.parent.rmdir()
        return self._files[0], [checksum(tensor) for tensor in tensors.values()]


class FilesystemReceiver(Receiver):
    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        """Loads views of the mapped files, where one rank holds all of a tensor. Raises RuntimeError when a file does
        not exist, be it because a newer version has been published."""
        rank_parts = [_read(path, manifest.tensors) for path in manifest.locations]
        return load_verified(join(rank_parts, manifest.tensors), manifest, load)


def _read(path: Path, entries: Sequence[TensorEntry]) -> NamedTensors:
    try:
        with safe_open(path, framework="pt") as file:
            for entry in entries:
                yield entry.name, file.get_tensor(entry.name)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"weight_sync.directory={path.parents[2]}: {path} is not there on {socket.gethostname()}; the directory "
            "must be one that trainer and replicas share"
        ) from error
    except SafetensorError as error:
        raise RuntimeError(f"{path} is not what was written: {error}") from error
