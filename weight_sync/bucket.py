"""Named tensors <-> one flat byte buffer, described by a manifest that any process can read it with."""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

ALIGNMENT = 64
"""Bytes. Lets every tensor be viewed in its own dtype, on cache-line boundaries."""


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[list[list[Any]], int]:
    """([name, dtype, shape, offset, nbytes] per tensor, bytes in all). Plain lists, because they cross processes."""
    entries: list[list[Any]] = []
    offset = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, nbytes])
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return entries, max(offset, ALIGNMENT)


def write(buffer: torch.Tensor, entries: list[list[Any]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy every tensor to its place in the flat uint8 buffer."""
    for name, dtype, shape, offset, nbytes in entries:
        view = buffer[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)
        view.copy_(tensors[name])


def read(buffer: torch.Tensor, entries: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view into the buffer) per tensor, without a copy."""
    for name, dtype, shape, offset, nbytes in entries:
        yield name, buffer[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)


def checksum(buffer: torch.Tensor) -> int:
    """CRC-32 of the buffer's bytes (about 1 GB/s and up; it runs while the engine generates)."""
    return zlib.crc32(memoryview(buffer.numpy()))
