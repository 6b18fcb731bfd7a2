"""Named tensors <-> one flat byte buffer, described by a manifest that any process can read it with."""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

ALIGNMENT = 64
"""Bytes. Lets every tensor be viewed in its own dtype, on cache-line boundaries."""


Spec = tuple[str, torch.dtype, list[int]]
"""(name, dtype, shape) of a tensor that is to come."""


def layout(specs: Sequence[Spec]) -> tuple[list[list[Any]], int]:
    """([name, dtype, shape, offset, nbytes] per tensor, bytes in all). Plain lists, because they cross processes."""
    entries: list[list[Any]] = []
    offset = 0
    for name, dtype, shape in specs:
        nbytes = math.prod(shape) * dtype.itemsize
        entries.append([name, str(dtype).removeprefix("torch."), list(shape), offset, nbytes])
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return entries, max(offset, ALIGNMENT)


def write(buffer: torch.Tensor, entries: list[list[Any]], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy the tensors, which come in the order of the entries, to their places in the flat uint8 buffer.

    Raises ValueError for a tensor that is missing, out of order or of another dtype or shape: nothing is cast here.
    """
    for (name, dtype, shape, offset, nbytes), (given, tensor) in zip(entries, tensors, strict=True):
        found = [given, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        if found != [name, dtype, shape]:
            raise ValueError(f"expected tensor {[name, dtype, shape]}, got {found}")
        buffer[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def read(buffer: torch.Tensor, entries: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view into the buffer) per tensor, without a copy."""
    for name, dtype, shape, offset, nbytes in entries:
        yield name, buffer[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)


def checksum(buffer: torch.Tensor) -> int:
    """CRC-32 of the buffer's bytes (about 1 GB/s and up; it runs while the engine generates)."""
    return zlib.crc32(buffer.numpy().data)
