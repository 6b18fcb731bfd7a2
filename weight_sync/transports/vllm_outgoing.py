"""The things that trainer ranks give to vLLM's half of a transfer: rows, whole tensors, or what has changed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from weight_sync.protocol import NamedTensors, Shards, TensorEntry
from weight_sync.transports import byte_layout
from weight_sync.transports.checksums import summed
from weight_sync.transports.delta import changed

AllGather = Callable[[torch.Tensor, torch.Tensor], object]
"""Fills the first tensor with the second one of every rank."""


@dataclass(slots=True)
class Outgoing:
    """The version that is being sent. A trainer's half keeps its source, so this changes from version to version."""

    rank: int
    num_ranks: int
    entries: Sequence[TensorEntry] = ()
    shards: Shards = lambda: iter(())
    checksums: list[int] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield (place of the whole tensor, this rank's rows), and take their checksums."""
        self.checksums.clear()
        own = byte_layout.rank_layout(self.entries, self.rank, self.num_ranks)
        rows = summed(byte_layout.checked(self.shards(), own), self.checksums)
        for entry, mine, (_, tensor) in zip(self.entries, own, rows, strict=True):
            yield entry, tensor.view(mine.shape)

    def whole(self) -> NamedTensors:
        """Yield (name, whole tensor). All ranks have to iterate together."""
        for entry, rows in self.rows():
            yield entry.name, gathered(entry, rows, self.num_ranks)


def gathered(
    entry: TensorEntry, rows: torch.Tensor, num_ranks: int, all_gather: AllGather = dist.all_gather_into_tensor
) -> torch.Tensor:
    """Return the whole tensor on every rank. They send equal lengths: FSDP2's last ranks have less, or nothing."""
    if num_ranks == 1:
        return rows.view(entry.shape)
    start, end = byte_layout.rank_part(entry, 0, num_ranks)  # rank 0 has the most
    padded = torch.zeros(end - start, dtype=torch.uint8, device=rows.device)
    padded[: rows.nbytes] = byte_layout.as_bytes(rows)
    of_all = torch.empty(num_ranks * len(padded), dtype=torch.uint8, device=rows.device)
    all_gather(of_all, padded)
    return of_all[: entry.nbytes].view(rows.dtype).view(entry.shape)


class Changed:
    """Finds the elements that are others than in the version before, bit for bit."""

    def __init__(self) -> None:
        self._before: dict[str, torch.Tensor] = {}
        self._version: int | None = None

    def patches(
        self, tensors: NamedTensors, base: int | None, version: int
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, tuple[int, ...]]]:
        """Yield (name, places, values, shape) of what has changed since `base`; of all, if that is not the version
        that was sent last. Keeps a copy of all tensors."""
        is_known, self._version = base is not None and base == self._version, None
        for name, tensor in tensors:
            flat = tensor.reshape(-1)
            if is_known:
                places = changed(self._before[name], flat)
                self._before[name].copy_(flat)
            else:
                places = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
                self._before[name] = flat.clone()
            if len(places):
                yield name, places, flat[places], tuple(tensor.shape)
        self._version = version
