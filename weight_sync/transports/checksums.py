"""Checksums of tensors: taken by the sender, verified by the receiver while it loads."""

import zlib
from collections.abc import Iterable, Iterator

import torch

from weight_sync.protocol import Checksums, Load, Manifest, NamedTensors, TensorEntry
from weight_sync.transports.byte_layout import as_bytes, rank_part

ROW = 512
"""Words of 8 bytes that one sum covers."""


def checksum(data: torch.Tensor) -> int:
    """32 bits over the bytes of a contiguous tensor, the same on CPU and GPU; about as fast as memory is read.

    The bytes are taken as 8-byte words in rows of 512. The checksum is the CRC-32 of the sums of all rows and of all
    columns, modulo 2^64, and of what is left over.
    """
    flat = as_bytes(data)
    whole = len(flat) // (8 * ROW) * 8 * ROW
    body, left = flat[:whole], flat[whole:]
    rest = flat.new_zeros(-(-len(left) // 8) * 8)
    rest[: len(left)] = left
    if body.data_ptr() % 8 or body.storage_offset() % 8:  # torch cannot view it as words
        body = body.clone()
    words = body.view(torch.int64).view(-1, ROW)
    # numpy sums int64 on CPU twice as fast as torch does.
    sums = (words.numpy().sum(axis) if words.is_cpu else words.sum(axis).cpu().numpy() for axis in (1, 0))
    digest = len(flat) & 0xFFFFFFFF
    for part in (*sums, rest.cpu().numpy()):
        digest = zlib.crc32(part.tobytes(), digest)
    return digest


def summed(
    rows: Iterable[tuple[TensorEntry, torch.Tensor]], checksums: list[int]
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """The rows, contiguous, whose checksums are appended on the way."""
    for entry, tensor in rows:
        contiguous = tensor.contiguous()
        checksums.append(checksum(contiguous))
        yield entry, contiguous


def part_checksums(tensor: torch.Tensor, entry: TensorEntry, num_ranks: int) -> list[int]:
    """The checksum of each rank's rows of a whole tensor."""
    flat = as_bytes(tensor)
    parts = (rank_part(entry, rank, num_ranks) for rank in range(num_ranks))
    return [checksum(flat[start - entry.offset : end - entry.offset]) for start, end in parts]


def load_verified(tensors: NamedTensors, manifest: Manifest, load: Load) -> tuple[Checksums, ...]:
    """Loads the tensors of a manifest that has checksums, and verifies each before. RuntimeError names the first that
    differs."""
    expected = manifest.checksums
    assert expected is not None

    def verified() -> NamedTensors:
        for index, (entry, (name, tensor)) in enumerate(zip(manifest.tensors, tensors, strict=True)):
            actual = part_checksums(tensor, entry, manifest.num_ranks)
            require_same(name, actual, [rank_checksums[index] for rank_checksums in expected])
            yield name, tensor

    load(verified())
    return expected


def require_same(name: str, actual: list[int], sent: list[int]) -> None:
    if actual != sent:
        raise RuntimeError(f"{name} came with checksums {actual}, sent were {sent}")
