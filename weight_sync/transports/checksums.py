"""Checksums of tensors: taken by the sender while it copies, verified by the receiver while it loads."""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from weight_sync.protocol import Checksums, Load, Manifest, NamedTensors, TensorEntry
from weight_sync.transports.byte_layout import as_bytes, checked, part_of

ROW = 512
"""Words of 8 bytes that one sum covers."""
ROWS_AT_A_TIME = 64
"""256 KiB, which stay in a core's cache until both sums are taken."""


def checksum(data: torch.Tensor) -> int:
    """32 bits over the bytes of a contiguous tensor, the same on CPU and GPU; about as fast as memory is read.

    The bytes are taken as 8-byte words in rows of 512. The checksum is the CRC-32 of the sums of all rows and of all
    columns, modulo 2^64.
    """
    return _checksum(as_bytes(data), None)


def copy_with_checksum(place: torch.Tensor, tensor: torch.Tensor) -> int:
    """Copies the tensor into flat uint8 host memory, and returns its checksum."""
    if tensor.is_cpu and tensor.is_contiguous() and _is_aligned(place):
        return _checksum(place, as_bytes(tensor.detach()))
    place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return checksum(place)


def summed(
    tensors: NamedTensors, own: Sequence[TensorEntry], checksums: list[int]
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """(entry, contiguous rows) of each of a rank's tensors, whose checksums are appended. Raises as `checked` does."""
    for entry, tensor in checked(tensors, own):
        rows = tensor.contiguous()
        checksums.append(checksum(rows))
        yield entry, rows


def checksums_of(tensor: torch.Tensor, entry: TensorEntry, num_ranks: int) -> list[int]:
    """The checksum of each rank's rows of a whole tensor."""
    flat = as_bytes(tensor)
    parts = (part_of(entry, rank, num_ranks) for rank in range(num_ranks))
    return [checksum(flat[start - entry.offset : end - entry.offset]) for start, end in parts]


def load_verified(tensors: NamedTensors, manifest: Manifest, load: Load) -> tuple[Checksums, ...]:
    """Loads the tensors of a manifest that has checksums, and verifies each before it is loaded.

    Raises:
        RuntimeError: A tensor differs; the message names the first that does.
    """
    assert manifest.checksums is not None
    load(_verified(tensors, manifest, manifest.checksums))
    return manifest.checksums


def _verified(tensors: NamedTensors, manifest: Manifest, expected: tuple[Checksums, ...]) -> NamedTensors:
    for index, (entry, (name, tensor)) in enumerate(zip(manifest.tensors, tensors, strict=True)):
        require_same(name, checksums_of(tensor, entry, manifest.num_ranks), [of_rank[index] for of_rank in expected])
        yield name, tensor


def require_same(name: str, found: list[int], sent: list[int]) -> None:
    if found != sent:
        raise RuntimeError(f"{name} came with checksums {found}, sent were {sent}")


def _checksum(flat: torch.Tensor, source: torch.Tensor | None) -> int:
    """Copies `source` into `flat` on the way, if given: both flat uint8 on the host and `flat` aligned. What is summed
    is still in the cache then."""
    num_words = len(flat) // 8
    whole = num_words // ROW * ROW * 8
    if source is not None:
        flat[whole:] = source[whole:]
    rest = flat.new_zeros(-(-(len(flat) - whole) // 8) * 8)
    rest[: len(flat) - whole] = flat[whole:]
    body = flat[:whole]
    if not _is_aligned(body):
        body = body.clone()
    rows, columns = _sums(body.view(torch.int64).view(-1, ROW), source)
    tail = rest.cpu().numpy().tobytes()
    return zlib.crc32(tail, zlib.crc32(columns.tobytes(), zlib.crc32(rows.tobytes(), len(flat) & 0xFFFFFFFF)))


def _is_aligned(flat: torch.Tensor) -> bool:
    """Whether torch can view it as words: it must be aligned in its storage as well as in memory."""
    return flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0


def _sums(words: torch.Tensor, source: torch.Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    if words.device.type != "cpu":
        return words.sum(1).cpu().numpy(), words.sum(0).cpu().numpy()
    array = words.numpy()  # numpy sums int64 three times as fast as torch does on CPU
    rows = np.empty(len(array), np.int64)
    columns = np.zeros(ROW, np.int64)
    for start in range(0, len(array), ROWS_AT_A_TIME):
        block = array[start : start + ROWS_AT_A_TIME]
        if source is not None:
            begin = start * ROW * 8
            block.view(np.uint8).reshape(-1)[:] = source[begin : begin + block.nbytes].numpy()
        rows[start : start + ROWS_AT_A_TIME] = block.sum(1)
        columns += block.sum(0)
    return rows, columns
