"""Weights through a folder that trainer and replicas share: safetensors files, any cluster, nothing but a file system.

Every rank writes its own rows into `<directory>/<owner>/v<global_steps>-<nonce>/rank_<rank>of<num_ranks>.safetensors`.
"""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the driver, which only removes files, does without torch
    import torch

    from weight_sync.protocol import Manifest
    from weight_sync.transports.base import Shards
    from weight_sync.transports.byte_layout import Entry, Spec

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

    def publish(self, specs: "Sequence[Spec]", shards: "Shards", order: dict[str, Any]) -> "Manifest":
        from weight_sync.transports import byte_layout as bucket  # noqa: PLC0415
        from weight_sync.transports import shard_layout as rows  # noqa: PLC0415

        entries, nbytes = bucket.layout(specs)
        own = rows.layout(entries, self._rank, self._num_ranks)
        version = self._folder / f"v{order['global_steps']}-{order['nonce']}"
        try:
            version.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeError(f"weight_sync.directory={self._folder.parent}: cannot be written: {error}") from error
        file = version / f"rank_{self._rank}of{self._num_ranks}.safetensors"
        checksums = _write(file, own, shards)
        before, self._file = self._file, file
        if before is not None:
            _remove(before)
        return {
            "transport": "filesystem",
            "global_steps": order["global_steps"],
            "nbytes": nbytes,
            "tensors": entries,
            "num_ranks": self._num_ranks,
            "location": {"directory": str(self._folder.parent), "file": str(file)},
            "checksums": checksums,
        }

    def send(self, shards: "Shards", manifest: "Manifest") -> list[int]:
        return manifest["checksums"][self._rank]

    def stop(self, manifest: "Manifest") -> None:
        """Nobody waits for anybody."""

    def close(self) -> None:
        if self._file is not None:
            _remove(self._file)
            with contextlib.suppress(OSError):  # other ranks still have theirs in it
                self._folder.rmdir()


class FilesystemReceiver:
    def tensors(self, manifest: "Manifest") -> "Iterator[tuple[str, torch.Tensor]]":
        """Views of the mapped files, where one rank holds all of a tensor. RuntimeError when a file is not there, or
        no more when the first tensor is asked for: then a newer version is."""
        from weight_sync.transports import byte_layout as bucket  # noqa: PLC0415
        from weight_sync.transports import shard_layout as rows  # noqa: PLC0415

        for location in manifest["locations"]:
            if not Path(location["file"]).is_file():
                raise RuntimeError(
                    f"weight_sync.directory={location['directory']}: {location['file']} is not there on "
                    f"{socket.gethostname()}; the directory must be one that trainer and replicas share"
                )
        num_ranks = manifest["num_ranks"]
        of_ranks = [
            _read(Path(location["file"]), rows.layout(manifest["tensors"], rank, num_ranks))
            for rank, location in enumerate(manifest["locations"])
        ]
        return bucket.verified(rows.join(of_ranks, manifest["tensors"]), manifest)


def _write(path: Path, own: "Sequence[Entry]", shards: "Shards") -> list[int]:
    """Tensor by tensor, so that no second copy is in memory. The file appears under its name when it is whole.

    Format: github.com/huggingface/safetensors, "Format".
    """
    from weight_sync.transports import byte_layout as bucket  # noqa: PLC0415
    from weight_sync.transports import shard_layout as rows  # noqa: PLC0415

    header, places = _header(own)
    aside = path.with_suffix(".part")
    checksums = []
    try:
        with open(aside, "wb") as file:
            file.write(header)
            for (name, *_), tensor in rows.checked(shards(), own):
                data = rows.as_bytes(tensor.cpu())
                checksums.append(bucket.checksum(data))
                file.seek(places[name])
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
    return checksums


def _header(own: "Sequence[Entry]") -> tuple[bytes, dict[str, int]]:
    """The file's head, and where in the file each tensor begins.

    Data follow one another without gaps, so large elements come first: then each tensor lies on a multiple of its own.
    """
    import torch  # noqa: PLC0415

    entries: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape, _, nbytes in sorted(own, key=lambda entry: -getattr(torch, entry[1]).itemsize):
        if dtype not in FORMAT_NAMES:
            raise ValueError(f"weight_sync.transport=filesystem: {name} is {dtype}; known are {list(FORMAT_NAMES)}")
        entries[name] = {"dtype": FORMAT_NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {
        name: begin + entry["data_offsets"][0] for name, entry in entries.items()
    }


def _read(path: Path, own: "Sequence[Entry]") -> "Iterator[tuple[str, torch.Tensor]]":
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(path, framework="pt") as file:
            for name, *_ in own:
                yield name, file.get_tensor(name)
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
