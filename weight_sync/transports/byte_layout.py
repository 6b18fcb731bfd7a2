"""The weights as one string of bytes: how tensors lie in it, who sends which part, and its checksums.

Every transport moves this string, whole or in windows of a bucket's size, so a tensor larger than a bucket is simply in
several windows. The layout follows from names, dtypes and shapes alone: each side computes it by itself.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from weight_sync.protocol import Manifest

ALIGNMENT = 64
"""Bytes. Lets every tensor be viewed in its own dtype, on cache-line boundaries."""
CHECKSUM_ROW = 512
"""Words of 8 bytes that one sum of the checksum covers."""
CHECKSUM_ROWS = 64
"""Rows copied and summed at a time: 256 KiB, which stay in a core's cache until both sums are taken."""

Spec = tuple[str, torch.dtype, list[int]]
"""(name, dtype, shape) of a tensor."""
Entry = tuple[str, str, list[int], int, int]
"""(name, dtype, shape, offset, nbytes): a tensor's place. Plain values, because entries cross processes."""


def layout(specs: Sequence[Spec]) -> tuple[list[Entry], int]:
    """Places in the order given, and the length of the whole string in bytes."""
    entries: list[Entry] = []
    offset = 0
    for name, dtype, shape in specs:
        nbytes = math.prod(shape) * dtype.itemsize
        entries.append((name, str(dtype).removeprefix("torch."), list(shape), offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return entries, max(offset, ALIGNMENT)


def part_of(entry: Entry, rank: int, num_ranks: int) -> tuple[int, int]:
    """[start, end) of the bytes of a tensor that trainer rank `rank` holds and sends.

    FSDP2 shards dimension 0 as `torch.chunk` does: equal parts rounded up, the last ranks get less, or nothing.
    """
    _, _, shape, offset, nbytes = entry
    rows = shape[0] if shape else 1
    row_bytes = nbytes // max(rows, 1)
    per_rank = -(-rows // num_ranks)
    return offset + min(rank * per_rank, rows) * row_bytes, offset + min((rank + 1) * per_rank, rows) * row_bytes


def write(
    buffer: torch.Tensor,
    entries: Sequence[Entry],
    tensors: Iterable[tuple[str, torch.Tensor]],
    rank: int,
    num_ranks: int,
) -> list[int]:
    """Copy this rank's part of every tensor to its place in the flat uint8 buffer; the checksum of each part.

    `tensors` come in the order of the entries. Raises ValueError for one that is missing, out of order, or of another
    dtype or size: nothing is cast here.
    """
    checksums = []
    for entry, (given, tensor) in zip(entries, tensors, strict=True):
        start, end = part_of(entry, rank, num_ranks)
        found = (given, str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        if found != (entry[0], entry[1], end - start):
            raise ValueError(f"expected {end - start} bytes of {entry[:3]}, got {found} of shape {list(tensor.shape)}")
        checksums.append(_copy(buffer[start:end], tensor))
    return checksums


def _copy(place: torch.Tensor, tensor: torch.Tensor) -> int:
    """Into flat uint8 host memory. The checksum of the tensor."""
    if tensor.is_cpu and tensor.is_contiguous() and _is_aligned(place):
        return _checksum(place, tensor.detach().reshape(-1).view(torch.uint8))
    place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return checksum(place)


def read(windows: Iterable[torch.Tensor], entries: Sequence[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) from consecutive windows of the string, each tensor as soon as its last byte is there.

    A tensor that lies in one window is a view, valid until the next item is asked for; another one is put together.
    Raises ValueError when the windows end early.
    """
    stream = iter(windows)
    window, begin = torch.empty(0, dtype=torch.uint8), 0  # `begin`: the window's place in the string
    for name, dtype, shape, offset, nbytes in entries:
        whole: torch.Tensor | None = None
        filled = 0
        while True:
            start = offset + filled - begin
            piece = window[start : min(start + nbytes - filled, len(window))] if start < len(window) else window[:0]
            if len(piece) == nbytes:
                whole = piece
                break
            if len(piece):
                if whole is None:
                    whole = torch.empty(nbytes, dtype=torch.uint8, device=piece.device)
                whole[filled : filled + len(piece)] = piece
                filled += len(piece)
                if filled == nbytes:
                    break
            begin += len(window)
            following = next(stream, None)
            if following is None:
                raise ValueError(f"the weights end at byte {begin}, within {name} at {offset}..{offset + nbytes}")
            window = following
        assert whole is not None
        yield name, whole.view(_dtype(dtype)).view(shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def checksum(data: torch.Tensor) -> int:
    """32 bits over the bytes of a contiguous tensor, the same on CPU and GPU; about as fast as memory is read.

    The bytes as 8-byte words in rows of 512: the CRC-32 of the sums of all rows and of all columns, modulo 2^64.
    """
    return _checksum(data.reshape(-1).view(torch.uint8), None)


def _checksum(flat: torch.Tensor, source: torch.Tensor | None) -> int:
    """`source`: flat uint8, copied into `flat` on the way, where that is aligned and both are on the host. It costs
    less than to copy it before, for what is summed is still in the cache."""
    num_words = len(flat) // 8
    whole = num_words // CHECKSUM_ROW * CHECKSUM_ROW * 8
    if source is not None:
        flat[whole:] = source[whole:]
    rest = flat.new_zeros(-(-(len(flat) - whole) // 8) * 8)
    rest[: len(flat) - whole] = flat[whole:]
    body = flat[:whole]
    if not _is_aligned(body):
        body = body.clone()
    rows, columns = _sums(body.view(torch.int64).view(-1, CHECKSUM_ROW), source)
    tail = rest.cpu().numpy().tobytes()
    return zlib.crc32(tail, zlib.crc32(columns.tobytes(), zlib.crc32(rows.tobytes(), len(flat) & 0xFFFFFFFF)))


def _is_aligned(flat: torch.Tensor) -> bool:
    """torch views as words only what is aligned in its storage too."""
    return flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0


def _sums(words: torch.Tensor, source: torch.Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    if words.device.type != "cpu":
        return words.sum(1).cpu().numpy(), words.sum(0).cpu().numpy()
    array = words.numpy()  # numpy sums int64 three times as fast as torch does on CPU
    rows = np.empty(len(array), np.int64)
    columns = np.zeros(CHECKSUM_ROW, np.int64)
    for start in range(0, len(array), CHECKSUM_ROWS):
        block = array[start : start + CHECKSUM_ROWS]
        if source is not None:
            begin = start * CHECKSUM_ROW * 8
            block.view(np.uint8).reshape(-1)[:] = source[begin : begin + block.nbytes].numpy()
        rows[start : start + CHECKSUM_ROWS] = block.sum(1)
        columns += block.sum(0)
    return rows, columns


def verified(tensors: Iterable[tuple[str, torch.Tensor]], manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, each held against the checksums of its parts. Raises RuntimeError that names the first that
    differs."""
    num_ranks = manifest["num_ranks"]
    for index, (entry, (name, tensor)) in enumerate(zip(manifest["tensors"], tensors, strict=True)):
        expected = [of_rank[index] for of_rank in manifest["checksums"]]
        found = checksums_of(tensor, entry, num_ranks)
        if found != expected:
            raise RuntimeError(f"{name} came with checksums {found}, sent were {expected}")
        yield name, tensor


def checksums_of(tensor: torch.Tensor, entry: Entry, num_ranks: int) -> list[int]:
    """Of each rank's part of a whole tensor."""
    flat = tensor.reshape(-1).view(torch.uint8)
    parts = (part_of(entry, rank, num_ranks) for rank in range(num_ranks))
    return [checksum(flat[start - entry[3] : end - entry[3]]) for start, end in parts]
