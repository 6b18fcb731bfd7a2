"""Weights by torch.distributed broadcast: gloo through host memory, NCCL between GPUs, any number of machines.

Trainer ranks and the workers of all replicas form a process group apart from the default groups of either side, in
which every trainer rank broadcasts its own rows. NCCL needs a GPU for each member; on a shared one, cuda_ipc works.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weight_sync.protocol import (
    Checksums,
    Load,
    Manifest,
    NamedTensors,
    PublishOrder,
    Receiver,
    ReceivingWorker,
    Shards,
    TensorEntry,
)
from weight_sync.transports import byte_layout
from weight_sync.transports.checksums import part_checksums, require_same, summed
from weight_sync.transports.locations import Meeting
from weight_sync.transports.process_group import (
    Membership,
    Transfer,
    announce,
    report_failure,
    serve_store,
)
from weight_sync.transports.sender import RankSender, Rows


class CollectiveSender(RankSender):
    """`publish` only says where to meet. `send` moves the bytes while the replicas receive."""

    transport = "collective"

    def __init__(self, rank: int, num_ranks: int, bucket_bytes: int, device: torch.device):
        """`bucket_bytes`: of all ranks' windows together; a member holds three at most. `device`: of the shards."""
        super().__init__(rank, num_ranks)
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._membership = Membership(device)
        self._store: Any = None

    def _offer(
        self, entries: Sequence[TensorEntry], rows: Rows, order: PublishOrder
    ) -> tuple[Meeting | None, Sequence[int] | None]:
        """Rank 0's location serves for all."""
        if self._rank:
            return None, None
        self._store = self._store or serve_store()
        return announce(self._store, order, self._num_ranks, self._bucket_bytes), None

    def send(self, shards: Shards, manifest: Manifest) -> Checksums:
        """Raises RuntimeError when a replica does not come, fails or is late."""
        strings, window = _windows(manifest)
        checksums: list[int] = []
        rows = summed(byte_layout.checked(shards(), strings[self._rank]), checksums)
        with self._membership.transfer(manifest.locations[0], self._rank) as transfer:
            packed = byte_layout.pack(rows, lambda: _buffer(window, self._device))
            for _ in _broadcasts(transfer, byte_layout.schedule(strings, window), self._device, self._rank, packed):
                pass
            assert next(packed, None) is None
            _exchange(transfer, checksums, self._num_ranks, self._device)
        return tuple(checksums)

    def stop(self, manifest: Manifest) -> None:
        if self._store is not None:  # rank 0 reports to all
            report_failure(self._store, manifest.locations[0].nonce, "the trainer stopped sending")


class CollectiveReceiver(Receiver):
    def __init__(self) -> None:
        self._membership: Membership | None = None

    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        """Loads from the GPU that the bytes came to, or from the host. The tensors are verified after the last one,
        when the checksums come."""
        meeting: Meeting = manifest.locations[0]
        device = torch.device(worker.device)
        self._membership = self._membership or Membership(device)
        entries, num_ranks = manifest.tensors, manifest.num_ranks
        actual: list[list[int]] = []

        def tensors(transfer: Transfer) -> NamedTensors:
            strings, window = _windows(manifest)
            windows = _broadcasts(transfer, byte_layout.schedule(strings, window), device)
            joined = byte_layout.join([byte_layout.read(windows, own) for own in strings], entries)
            for entry, (name, tensor) in zip(entries, joined, strict=True):
                actual.append(part_checksums(tensor, entry, num_ranks))
                yield name, tensor

        with self._membership.transfer(meeting, meeting.first_rank[worker.replica] + worker.index) as transfer:
            load(tensors(transfer))
            if len(actual) < len(entries):  # the other members would wait for this one until the deadline
                raise RuntimeError(f"{entries[len(actual)].name} was not loaded, nor what follows it")
            sent = _exchange(transfer, [0] * len(entries), num_ranks, device)
        for entry, tensor_checksums, expected in zip(entries, actual, zip(*sent, strict=True), strict=True):
            require_same(entry.name, tensor_checksums, list(expected))
        return sent


def _broadcasts(
    transfer: Transfer,
    schedule: Iterator[tuple[int, int]],
    device: torch.device,
    own_rank: int = -1,
    packed: Iterator[torch.Tensor] | None = None,
) -> Iterator[torch.Tensor]:
    """The windows of all ranks, each when it has come or gone, while the next one is on its way. A trainer rank sends
    those that it has `packed`, and takes part in the others: gloo passes them on through every member."""
    under_way: list[tuple[torch.Tensor, Any]] = []
    for rank, length in schedule:
        window = next(packed) if packed and rank == own_rank else _buffer(length, device)
        under_way.append((window, transfer.broadcast(window, rank)))
        if len(under_way) > 1:
            transfer.wait(under_way[0][1])
            yield under_way.pop(0)[0]
    for window, work in under_way:
        transfer.wait(work)
        yield window


def _buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _exchange(transfer: Transfer, own: Sequence[int], num_ranks: int, device: torch.device) -> tuple[Checksums, ...]:
    """Every trainer rank's checksums. `own` are a trainer rank's; a receiver gives as many of any value."""
    sent: list[Checksums] = []
    for root in range(num_ranks):
        values = torch.tensor(own, dtype=torch.int64, device=device)
        if own:
            transfer.wait(transfer.broadcast(values, root))
        sent.append(tuple(values.tolist()))
    return tuple(sent)


def _windows(manifest: Manifest) -> tuple[list[tuple[TensorEntry, ...]], int]:
    """Every rank's string, and the length of their windows in bytes."""
    num_ranks = manifest.num_ranks
    strings = [byte_layout.rank_layout(manifest.tensors, rank, num_ranks) for rank in range(num_ranks)]
    longest = max(byte_layout.length(own) for own in strings)
    return strings, min(byte_layout.window_bytes(manifest.locations[0].bucket_bytes, num_ranks), longest)
