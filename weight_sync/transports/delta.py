"""A transport that sends only what changed, over any other transport.

Between optimizer steps of RL most weights in bfloat16 are the same to the last bit: the step is smaller than half the
distance to the format's next value. So every rank compares its rows with those that it published before, and sends
positions and values of what differs by an inner sender of its own. Receivers keep the whole weights of the last version
in host memory and write over them. Each worker of a replica does so for itself, because which rows it needs is known
only to the engine's loading code.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from weight_sync.protocol import (
    Checksums,
    Load,
    Manifest,
    NamedTensors,
    PublishOrder,
    Receiver,
    ReceivingWorker,
    Sender,
    Shards,
    TensorEntry,
    TensorSpec,
)
from weight_sync.transports.byte_layout import rank_part
from weight_sync.transports.checksums import checksum, part_checksums
from weight_sync.transports.locations import Changes
from weight_sync.transports.sender import RankSender, Rows

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size in bytes. As integers, NaN equals itself and 0.0 is not -0.0."""
INT32_MAX = 2**31 - 1
SPARSE, WHOLE = "sparse", "whole"


class DeltaSender(RankSender):
    """Keeps a second copy of the rows on `device`."""

    transport = "delta"

    def __init__(self, inner: Sender, rank: int, num_ranks: int, device: torch.device):
        """`inner` is made as rank 0 of 1, because what changed has another size on every rank."""
        super().__init__(rank, num_ranks)
        self._inner = inner
        self._device = device
        self._kept: list[torch.Tensor] = []
        self._checksums: list[int] = []
        self._version: int | None = None
        """Version of `_kept`. None: there is nothing to compare with."""
        self._encoding: list[tuple[int, str]] = []
        self._payload: list[tuple[str, torch.Tensor]] = []

    def publish(self, specs: Sequence[TensorSpec], shards: Shards, order: PublishOrder) -> Manifest:
        manifest = super().publish(specs, shards, order)
        return replace(manifest, nbytes=manifest.locations[0].inner.nbytes)

    def _offer(
        self, entries: Sequence[TensorEntry], rows: Rows, order: PublishOrder
    ) -> tuple[Changes, Sequence[int] | None]:
        base = order.base if order.base == self._version else None
        self._version = None  # until all rows have been compared
        self._encoding, self._payload = [], []
        if base is None:
            self._kept, self._checksums = [], []
        for index, (entry, tensor) in enumerate(rows):
            new = tensor.contiguous().to(self._device)
            if base is None:
                self._kept.append(new.clone())
                self._checksums.append(checksum(new))
                self._send_whole(index, entry)
            else:
                self._compare(index, entry, new)
        self._version = order.global_steps
        specs = [(name, tensor.dtype, tensor.shape) for name, tensor in self._payload]
        # Ranks publish concurrently, and each inner sender takes itself for rank 0: the nonce tells them apart.
        inner_order = replace(order, nonce=f"{order.nonce}{self._rank:04x}")
        inner = self._inner.publish(specs, lambda: iter(self._payload), inner_order)
        checksums = tuple(self._checksums)
        changes = Changes(base=base, encoding=tuple(self._encoding), inner=inner, checksums=checksums)
        return changes, None if inner.checksums is None else checksums

    def _compare(self, index: int, entry: TensorEntry, new: torch.Tensor) -> None:
        kept = self._kept[index]
        positions = changed(kept, new)
        if not len(positions):
            return
        kept.copy_(new)
        self._checksums[index] = checksum(kept)
        if len(positions) * (positions.element_size() + new.element_size()) < new.nbytes:
            self._encoding.append((index, SPARSE))
            values = new.view(-1)[positions.long()]
            self._payload += [(f"{entry.name}.positions", positions), (f"{entry.name}.values", values)]
        else:
            self._send_whole(index, entry)

    def _send_whole(self, index: int, entry: TensorEntry) -> None:
        if entry.nbytes:
            self._encoding.append((index, WHOLE))
            self._payload.append((entry.name, self._kept[index]))

    def send(self, shards: Shards, manifest: Manifest) -> Checksums:
        changes = manifest.locations[self._rank]
        self._inner.send(lambda: iter(self._payload), changes.inner)
        return changes.checksums

    def stop(self, manifest: Manifest) -> None:
        self._inner.stop(manifest.locations[self._rank].inner)


class DeltaReceiver(Receiver):
    def __init__(self, make_inner: Callable[[str], Receiver]):
        """`make_inner` makes a receiver of the transport of that name; each trainer rank gets one."""
        self._make_inner = make_inner
        self._inner: dict[int, Receiver] = {}
        self._tensors: list[torch.Tensor] = []
        self._checksums: tuple[Checksums, ...] = ()
        self._version: int | None = None
        """Version of `_tensors`. None: they are of no version."""

    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        """Loads those that changed, whole, from host memory. Raises RuntimeError when this receiver does not hold the
        version that they are changes of."""
        held, self._version = self._version, None  # a failure, here or in `load`, leaves no base behind
        parts: Sequence[Changes] = manifest.locations
        bases = {changes.base for changes in parts}
        for base in bases - {None, held}:
            holds = "none" if held is None else held
            raise RuntimeError(f"delta is against version {base}, this replica holds {holds}")
        touched = {index for changes in parts for index, _ in changes.encoding}
        if bases == {None}:
            touched = set(range(len(manifest.tensors)))
            self._tensors = []  # first: two copies may not fit
            self._tensors = [torch.empty(e.shape, dtype=getattr(torch, e.dtype)) for e in manifest.tensors]
        for rank, changes in enumerate(parts):
            self._apply(changes, manifest, rank, worker)
        checksums = tuple(changes.checksums for changes in parts)
        self._verify(manifest, touched, checksums)
        load((manifest.tensors[index].name, self._tensors[index]) for index in sorted(touched))
        self._version, self._checksums = manifest.global_steps, checksums
        return checksums

    def _apply(self, changes: Changes, manifest: Manifest, rank: int, worker: ReceivingWorker) -> None:
        """Writes the changes of one rank's rows over the base."""

        def load(received: NamedTensors) -> None:
            for index, kind in changes.encoding:
                tensor, entry = self._tensors[index], manifest.tensors[index]
                places = (place - entry.offset for place in rank_part(entry, rank, manifest.num_ranks))
                rows = tensor.view(-1)[slice(*(place // tensor.element_size() for place in places))]
                if kind == WHOLE:
                    rows.copy_(next(received)[1].reshape(-1))
                else:
                    positions = next(received)[1].to("cpu", torch.int64, copy=True)
                    put(rows, positions, next(received)[1].cpu())

        if rank not in self._inner:
            self._inner[rank] = self._make_inner(changes.inner.transport)
        self._inner[rank].receive(changes.inner, worker, load)

    def _verify(self, manifest: Manifest, touched: set[int], expected: tuple[Checksums, ...]) -> None:
        """The trainer's checksums are of all its rows: where nothing was sent, the base's must be the same."""
        for index, entry in enumerate(manifest.tensors):
            sent = [rank_checksums[index] for rank_checksums in expected]
            if index in touched:
                actual = part_checksums(self._tensors[index], entry, manifest.num_ranks)
            else:
                actual = [rank_checksums[index] for rank_checksums in self._checksums]
            if actual != sent:
                raise RuntimeError(f"{entry.name} has checksums {actual} after the changes, the trainer's has {sent}")


def changed(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Flat positions, ascending, of the elements of which any bit differs; int32 where that is enough, else int64. Both
    tensors are contiguous."""
    positions = torch.nonzero(_bits(old) != _bits(new)).view(-1)
    return positions.to(torch.int32 if new.numel() <= INT32_MAX else torch.int64)


def put(tensor: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Writes over the elements at flat positions of a contiguous tensor."""
    _bits(tensor)[positions.long()] = _bits(values)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(BITS[tensor.element_size()])
