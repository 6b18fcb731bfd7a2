"""Weights through a folder that trainer and replicas share: safetensors files, any cluster, nothing but a file system.

Every rank writes its own rows into `<directory>/<owner>/v<global_steps>-<nonce>/rank_<rank>of<num_ranks>.safetensors`.
"""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.protocol import (
    Checksums,
    Manifest,
    NamedTensors,
    Publication,
    PublishOrder,
    RankFile,
    ReceivingWorker,
    Shards,
    TensorEntry,
    TensorSpec,
)

if TYPE_CHECKING:  # the driver, which only removes files, does without torch
    import torch


FORMAT_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
"""Of dtypes, as safetensors spells them."""


class FilesystemSender:
    """Keeps the version published last. A reader that has mapped the one before keeps its mapping."""

    def __init__(self, owner: str, rank: int, num_ranks: int, directory: Path):
        self._folder = directory / owner
        self._rank, self._num_ranks = rank, num_ranks
        self._file: Path | None = None

    def publish(self, specs: Sequence[TensorSpec], shards: Shards, order: PublishOrder) -> Publication:
        from weight_sync.transports import byte_layout

        entries, _ = byte_layout.layout(specs)
        own = byte_layout.rank_layout(entries, self._rank, self._num_ranks)
        version = self._folder / f"v{order.global_steps}-{order.nonce}"
        try:
            version.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeError(f"weight_sync.directory={self._folder.parent}: cannot be written: {error}") from error
        file = version / f"rank_{self._rank}of{self._num_ranks}.safetensors"
        checksums = _write(file, own, shards)
        before, self._file = self._file, file
        if before is not None:
            _remove(before)
        return Publication(
            transport="filesystem",
            global_steps=order.global_steps,
            nbytes=byte_layout.total_bytes(own),
            tensors=entries,
            location=RankFile(directory=str(self._folder.parent), file=str(file)),
            checksums=checksums,
        )

    def send(self, shards: Shards, manifest: Manifest) -> Checksums:
        assert manifest.checksums is not None
        return manifest.checksums[self._rank]

    def stop(self, manifest: Manifest) -> None:
        """Nobody waits for anybody."""


class FilesystemReceiver:
    def receive(
        self, manifest: Manifest, worker: ReceivingWorker, load: Callable[[NamedTensors], None]
    ) -> tuple[Checksums, ...]:
        """Loads views of the mapped files, where one rank holds all of a tensor. Raises RuntimeError when a file does
        not exist, be it because a newer version has been published."""
        from weight_sync.transports import byte_layout
        from weight_sync.transports.checksums import load_verified

        of_ranks = []
        for rank, location in enumerate(manifest.located(RankFile)):
            if not Path(location.file).is_file():
                raise RuntimeError(
                    f"weight_sync.directory={location.directory}: {location.file} is not there on "
                    f"{socket.gethostname()}; the directory must be one that trainer and replicas share"
                )
            own = byte_layout.rank_layout(manifest.tensors, rank, manifest.num_ranks)
            of_ranks.append(_read(Path(location.file), own))
        return load_verified(byte_layout.join(of_ranks, manifest.tensors), manifest, load)


def _write(path: Path, own: Sequence[TensorEntry], shards: Shards) -> Checksums:
    """Tensor by tensor, so that no second copy is in memory. The file appears under its name when it is whole.

    Format: github.com/huggingface/safetensors, "Format".
    """
    from weight_sync.transports.byte_layout import as_bytes, checked
    from weight_sync.transports.checksums import checksum

    header, places = _header(own)
    aside = path.with_suffix(".part")
    checksums = []
    try:
        with open(aside, "wb") as file:
            file.write(header)
            for entry, tensor in checked(shards(), own):
                data = as_bytes(tensor.contiguous().cpu())
                checksums.append(checksum(data))
                file.seek(places[entry.name])
                file.write(data.numpy().data)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        _remove(aside)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return tuple(checksums)


def _header(own: Sequence[TensorEntry]) -> tuple[bytes, dict[str, int]]:
    """The file's head, and where in the file each tensor begins.

    Data follow one another without gaps, so large elements come first: then each tensor lies on a multiple of its own.
    """
    from weight_sync.transports.byte_layout import dtype_of

    entries: dict[str, Any] = {}
    offset = 0
    for entry in sorted(own, key=lambda entry: -dtype_of(entry.dtype).itemsize):
        if entry.dtype not in FORMAT_NAMES:
            known = f"known are {list(FORMAT_NAMES)}"
            raise ValueError(f"weight_sync.transport=filesystem: {entry.name} is {entry.dtype}; {known}")
        end = offset + entry.nbytes
        entries[entry.name] = {
            "dtype": FORMAT_NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {
        name: begin + entry["data_offsets"][0] for name, entry in entries.items()
    }


def _read(path: Path, own: Sequence[TensorEntry]) -> "Iterator[tuple[str, torch.Tensor]]":
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for entry in own:
                yield entry.name, file.get_tensor(entry.name)
    except FileNotFoundError as error:
        raise RuntimeError(f"{path} is gone: a newer version has been published") from error
    except SafetensorError as error:
        raise RuntimeError(f"{path} is not what was written: {error}") from error


def _remove(file: Path) -> None:
    """And its folder, when it was the last one in it."""
    file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        file.parent.rmdir()


def release_all(directory: Path, owner: str) -> None:
    """Remove everything of `owner`: what a crash left, too."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory / owner)
