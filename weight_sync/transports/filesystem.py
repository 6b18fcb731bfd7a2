"""Weights through a folder that trainer and replicas share: safetensors files, any cluster, nothing but a file system.

Every rank writes its own rows into `<directory>/<owner>/v<global_steps>-<nonce>/rank_<rank>of<num_ranks>.safetensors`.
"""

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weight_sync.protocol import (
    Checksums,
    Load,
    Manifest,
    NamedTensors,
    Publication,
    PublishOrder,
    RankFile,
    Receiver,
    ReceivingWorker,
    Sender,
    Shards,
    TensorEntry,
    TensorSpec,
)
from weight_sync.transports import byte_layout
from weight_sync.transports.checksums import checksum, load_verified

_TORCH_NAMES = "bool uint8 int8 int16 int32 int64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 float64"
_FILE_NAMES = "BOOL U8 I8 I16 I32 I64 F8_E4M3 F8_E5M2 F16 BF16 F32 F64"
FORMAT_NAMES = dict(zip(_TORCH_NAMES.split(), _FILE_NAMES.split(), strict=True))
"""dtypes as safetensors spells them."""


class FilesystemSender(Sender):
    """Keeps the version published last. A reader that has mapped the one before keeps its mapping."""

    def __init__(self, owner: str, rank: int, num_ranks: int, directory: Path):
        self._folder = directory / owner
        self._rank, self._num_ranks = rank, num_ranks
        self._file: Path | None = None

    def publish(self, specs: Sequence[TensorSpec], shards: Shards, order: PublishOrder) -> Publication:
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
            nbytes=sum(entry.nbytes for entry in own),
            tensors=entries,
            location=RankFile(str(file)),
            checksums=checksums,
        )


class FilesystemReceiver(Receiver):
    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        """Loads views of the mapped files, where one rank holds all of a tensor. Raises RuntimeError when a file does
        not exist, be it because a newer version has been published."""
        of_ranks = []
        for rank, file in enumerate(manifest.located(RankFile)):
            path = Path(file.path)
            if not path.is_file():
                raise RuntimeError(
                    f"weight_sync.directory={path.parents[2]}: {path} is not there on {socket.gethostname()}; the "
                    "directory must be one that trainer and replicas share"
                )
            of_ranks.append(_read(path, byte_layout.rank_layout(manifest.tensors, rank, manifest.num_ranks)))
        return load_verified(byte_layout.join(of_ranks, manifest.tensors), manifest, load)


def _write(path: Path, own: Sequence[TensorEntry], shards: Shards) -> Checksums:
    """Tensor by tensor, so that no second copy is in memory. The file appears under its name when it is whole.

    Format: github.com/huggingface/safetensors, "Format".
    """
    header, places = _header(own)
    aside = path.with_suffix(".part")
    checksums = []
    try:
        with open(aside, "wb") as file:
            file.write(header)
            for entry, tensor in byte_layout.checked(shards(), own):
                data = byte_layout.as_bytes(tensor.contiguous().cpu())
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
    """The head of the file, and where in the file each tensor begins.

    Tensors follow one another without gaps, so those with large elements come first: then each lies on a multiple of
    its element's size.
    """
    described: dict[str, Any] = {}
    offset = 0
    for entry in sorted(own, key=lambda entry: -getattr(torch, entry.dtype).itemsize):
        if entry.dtype not in FORMAT_NAMES:
            known = f"known are {list(FORMAT_NAMES)}"
            raise ValueError(f"weight_sync.transport=filesystem: {entry.name} is {entry.dtype}; {known}")
        place = [offset, offset + entry.nbytes]
        described[entry.name] = {"dtype": FORMAT_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": place}
        offset += entry.nbytes
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    places = {name: begin + fields["data_offsets"][0] for name, fields in described.items()}
    return len(text).to_bytes(8, "little") + text, places


def _read(path: Path, own: Sequence[TensorEntry]) -> NamedTensors:
    try:
        with safe_open(path, framework="pt") as file:
            for entry in own:
                yield entry.name, file.get_tensor(entry.name)
    except FileNotFoundError as error:
        raise RuntimeError(f"{path} is gone: a newer version has been published") from error
    except SafetensorError as error:
        raise RuntimeError(f"{path} is not what was written: {error}") from error


def _remove(file: Path) -> None:
    """Its folder too, when it was the last file in it."""
    file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        file.parent.rmdir()
