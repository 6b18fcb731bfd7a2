"""What one trainer rank holds, its rows of every tensor, as a string of bytes of its own.

For transports in which every rank offers or sends its own, so that nothing is gathered, and receivers join the rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from weight_sync.transports import byte_layout as bucket
from weight_sync.transports.byte_layout import ALIGNMENT, Entry


def layout(entries: Sequence[Entry], rank: int, num_ranks: int) -> list[Entry]:
    """Places of the rank's rows in its own string. `entries`: of whole tensors. One without dimensions is rank 0's."""
    own: list[Entry] = []
    offset = 0
    for entry in entries:
        name, dtype, shape, _, _ = entry
        start, end = bucket.part_of(entry, rank, num_ranks)
        own.append((name, dtype, _shape(shape, rank, num_ranks), offset, end - start))
        offset += -(-(end - start) // ALIGNMENT) * ALIGNMENT
    return own


def _shape(shape: list[int], rank: int, num_ranks: int) -> list[int]:
    if not shape:
        return [] if rank == 0 else [0]
    per_rank = -(-shape[0] // num_ranks)
    return [min((rank + 1) * per_rank, shape[0]) - min(rank * per_rank, shape[0]), *shape[1:]]


def length(own: Sequence[Entry]) -> int:
    """Bytes to the end of the last tensor that has any."""
    return max((offset + nbytes for *_, offset, nbytes in own if nbytes), default=0)


def window_bytes(bucket_bytes: int, num_ranks: int) -> int:
    """Length of a window, when one of every rank makes a bucket."""
    return max(bucket_bytes // num_ranks // ALIGNMENT, 1) * ALIGNMENT


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, flat."""
    return tensor.reshape(-1).view(torch.uint8)


def checked(tensors: Iterable[tuple[str, torch.Tensor]], own: Sequence[Entry]) -> Iterator[tuple[Entry, torch.Tensor]]:
    """(entry, contiguous rows) of each. Raises ValueError for a tensor that is missing, out of order, or of another
    dtype or size: nothing is cast here."""
    for entry, (name, tensor) in zip(own, tensors, strict=True):
        found = (name, str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        if found != (entry[0], entry[1], entry[4]):
            raise ValueError(f"expected {entry[4]} bytes of {entry[:3]}, got {found} of shape {list(tensor.shape)}")
        yield entry, tensor.detach().contiguous()


def pack(
    tensors: Iterable[tuple[Entry, torch.Tensor]], next_window: Callable[[], torch.Tensor], checksums: list[int]
) -> Iterator[torch.Tensor]:
    """The string in windows, each in the flat uint8 buffer that `next_window` gave for it; all buffers have one length.

    Adds the checksum of each tensor's rows to `checksums`.
    """
    window, begin, filled = torch.empty(0, dtype=torch.uint8), 0, 0  # `begin`: the window's place in the string
    for (*_, offset, nbytes), tensor in tensors:
        data = as_bytes(tensor)
        checksums.append(bucket.checksum(data))
        done = 0
        while done < nbytes:
            place = offset + done - begin
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


def schedule(strings: Sequence[Sequence[Entry]], window: int) -> Iterator[tuple[int, int]]:
    """(rank, length in bytes) of every window, in the order in which `join` comes to need them."""
    lengths = [length(own) for own in strings]
    arrived = [0] * len(strings)
    for places in zip(*strings, strict=True):
        for rank, (*_, offset, nbytes) in enumerate(places):
            while nbytes and arrived[rank] < offset + nbytes:
                size = min(window, lengths[rank] - arrived[rank])
                arrived[rank] += size
                yield rank, size


def join(
    of_ranks: Sequence[Iterable[tuple[str, torch.Tensor]]], entries: Sequence[Entry]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) from every rank's rows. Where one rank holds all of a tensor, it is not copied."""
    for (name, _, shape, _, _), parts in zip(entries, zip(*of_ranks, strict=True), strict=True):
        held = [tensor for _, tensor in parts if tensor.numel()] or [parts[0][1]]
        yield name, (held[0] if len(held) == 1 else torch.cat(held)).view(shape)
