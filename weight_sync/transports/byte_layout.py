"""The weights as strings of bytes: how tensors lie in one, and how it is cut into windows and put together again.

One string holds all tensors whole; `layout` says where. Transports in which every rank sends its own rows use one
string for each rank instead, `rank_layout`, so that nothing is gathered, and receivers `join` the rows. A string moves
in windows of a bucket's size, so a tensor larger than a bucket simply lies in several windows. Layouts follow from
names, dtypes and shapes alone: each side computes them by itself.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from weight_sync.protocol import NamedTensors, TensorEntry, TensorSpec

ALIGNMENT = 64
"""Bytes. Lets every tensor be viewed in its own dtype, on cache-line boundaries."""


def layout(specs: Sequence[TensorSpec]) -> tuple[TensorEntry, ...]:
    """Places of whole tensors, in the order given."""
    return _place(
        (name, dtype_name(dtype), tuple(shape), math.prod(shape) * dtype.itemsize) for name, dtype, shape in specs
    )


def rank_layout(entries: Sequence[TensorEntry], rank: int, num_ranks: int) -> tuple[TensorEntry, ...]:
    """Places of one trainer rank's rows in a string of its own. `entries` are of whole tensors."""
    sizes = []
    for entry in entries:
        first, last = _rank_rows(entry.shape, rank, num_ranks)
        shape = (last - first, *entry.shape[1:]) if entry.shape or rank else ()
        start, end = rank_part(entry, rank, num_ranks)
        sizes.append((entry.name, entry.dtype, shape, end - start))
    return _place(sizes)


def rank_part(entry: TensorEntry, rank: int, num_ranks: int) -> tuple[int, int]:
    """[start, end) of the bytes of a whole tensor that a trainer rank holds and sends."""
    first, last = _rank_rows(entry.shape, rank, num_ranks)
    row_bytes = entry.nbytes // max(entry.shape[0] if entry.shape else 1, 1)
    return entry.offset + first * row_bytes, entry.offset + last * row_bytes


def _rank_rows(shape: Sequence[int], rank: int, num_ranks: int) -> tuple[int, int]:
    """[first, last) of the rows that a rank holds. FSDP2 shards dimension 0 as `torch.chunk` does: equal parts rounded
    up, so the last ranks get less, or nothing. A tensor without dimensions is one row, of rank 0."""
    rows = shape[0] if shape else 1
    per_rank = -(-rows // num_ranks)
    return min(rank * per_rank, rows), min((rank + 1) * per_rank, rows)


def _place(sizes: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[TensorEntry, ...]:
    """Entries one after the other, each aligned. `sizes`: (name, dtype, shape, nbytes)."""
    entries, offset = [], 0
    for name, dtype, shape, nbytes in sizes:
        entries.append(TensorEntry(name, dtype, shape, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(entries)


def length(entries: Sequence[TensorEntry]) -> int:
    """Bytes to the end of the last tensor that has any."""
    return max((entry.offset + entry.nbytes for entry in entries if entry.nbytes), default=0)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, flat."""
    return tensor.reshape(-1).view(torch.uint8)


def checked(
    tensors: Iterable[tuple[str, torch.Tensor]], own: Sequence[TensorEntry]
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """(entry, rows) of each of a rank's tensors. ValueError when one is missing, out of order, or of another dtype or
    size: nothing is cast here."""
    for entry, (name, tensor) in zip(own, tensors, strict=True):
        actual = (name, dtype_name(tensor.dtype), tensor.nbytes)
        if actual != (entry.name, entry.dtype, entry.nbytes):
            expected = (entry.name, entry.dtype, list(entry.shape))
            raise ValueError(f"expected {entry.nbytes} bytes of {expected}, got {actual} of shape {list(tensor.shape)}")
        yield entry, tensor.detach()


def pack(
    tensors: Iterable[tuple[TensorEntry, torch.Tensor]], next_window: Callable[[], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The string in windows, each in the flat uint8 buffer that `next_window` gave; all have one length."""
    window, begin, filled = torch.empty(0, dtype=torch.uint8), 0, 0  # `begin`: the window's place in the string
    for entry, tensor in tensors:
        data = as_bytes(tensor)
        done = 0
        while done < entry.nbytes:
            place = entry.offset + done - begin
            if place >= len(window):
                if filled:
                    yield window
                begin += len(window)
                window, filled = next_window(), 0
                continue
            piece = data[done : done + len(window) - place]
            window[place : place + len(piece)] = piece
            done += len(piece)
            filled = place + len(piece)
    if filled:
        yield window[:filled]


def window_bytes(bucket_bytes: int, num_ranks: int) -> int:
    """Length of a window, when one of every rank makes a bucket."""
    return max(bucket_bytes // num_ranks // ALIGNMENT, 1) * ALIGNMENT


def schedule(strings: Sequence[Sequence[TensorEntry]], window: int) -> Iterator[tuple[int, int]]:
    """(rank, length in bytes) of every window, in the order in which `join` comes to need them."""
    lengths = [length(own) for own in strings]
    arrived = [0] * len(strings)
    for places in zip(*strings, strict=True):
        for rank, entry in enumerate(places):
            while entry.nbytes and arrived[rank] < entry.offset + entry.nbytes:
                size = min(window, lengths[rank] - arrived[rank])
                arrived[rank] += size
                yield rank, size


def read(windows: Iterable[torch.Tensor], entries: Sequence[TensorEntry]) -> NamedTensors:
    """(name, tensor) from consecutive windows of the string, each tensor as soon as its last byte has come. Within
    one window it is a view, valid until the next item is asked for. ValueError when the windows end early."""
    stream = iter(windows)
    window, begin = torch.empty(0, dtype=torch.uint8), 0  # `begin`: the window's place in the string
    for entry in entries:
        data, filled = window[:0], 0
        while filled < entry.nbytes:
            start = entry.offset + filled - begin
            piece = window[start : start + entry.nbytes - filled]
            if len(piece) == entry.nbytes:
                data = piece
            elif len(piece):
                data = data if filled else torch.empty(entry.nbytes, dtype=torch.uint8, device=piece.device)
                data[filled : filled + len(piece)] = piece
            filled += len(piece)
            if filled < entry.nbytes:
                begin += len(window)
                following = next(stream, None)
                if following is None:
                    place = f"{entry.name} at {entry.offset}..{entry.offset + entry.nbytes}"
                    raise ValueError(f"the weights end at byte {begin}, within {place}")
                window = following
        yield entry.name, data.view(getattr(torch, entry.dtype)).view(entry.shape)


def join(rank_parts: Sequence[Iterable[tuple[str, torch.Tensor]]], entries: Sequence[TensorEntry]) -> NamedTensors:
    """(name, whole tensor) from every rank's rows. Where one rank holds all of a tensor, it is not copied."""
    for entry, parts in zip(entries, zip(*rank_parts, strict=True), strict=True):
        held = [tensor for _, tensor in parts if tensor.numel()] or [parts[0][1]]
        yield entry.name, (held[0] if len(held) == 1 else torch.cat(held)).view(entry.shape)
