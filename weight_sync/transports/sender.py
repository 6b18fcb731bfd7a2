"""A transport's half in one trainer rank, which offers its own rows of every tensor."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weight_sync.protocol import Manifest, PublishOrder, Sender, Shards, TensorEntry, TensorSpec
from weight_sync.transports.byte_layout import checked, layout, rank_layout

Rows = Iterator[tuple[TensorEntry, torch.Tensor]]
"""(place in the rank's string, this rank's rows) of every tensor, in the order of the entries."""


class RankSender(Sender):
    """Offers a rank's rows. What is done with them is the transport's own `_offer`."""

    transport: str

    def __init__(self, rank: int, num_ranks: int):
        self._rank, self._num_ranks = rank, num_ranks

    def publish(self, specs: Sequence[TensorSpec], shards: Shards, order: PublishOrder) -> Manifest:
        entries = layout(specs)
        own = rank_layout(entries, self._rank, self._num_ranks)
        location, checksums = self._offer(entries, checked(shards(), own), order)
        return Manifest(
            transport=self.transport,
            global_steps=order.global_steps,
            nbytes=sum(entry.nbytes for entry in own),
            tensors=entries,
            locations=(location,),
            checksums=None if checksums is None else (tuple(checksums),),
        )

    def _offer(
        self, entries: Sequence[TensorEntry], rows: Rows, order: PublishOrder
    ) -> tuple[Any, Sequence[int] | None]:
        """Returns how the bytes can be reached, and their checksums by tensor, if they are known. `entries` are of the
        whole tensors."""
        raise NotImplementedError
