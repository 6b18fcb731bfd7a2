"""Weights by torch.distributed broadcast: gloo through host memory, NCCL between GPUs, any number of machines.

Trainer ranks and the workers of all replicas form a process group apart from the default groups of either side, in
which every trainer rank broadcasts its own rows. NCCL needs a GPU for each member; on a shared one, cuda_ipc works.
"""

import itertools
from collections import deque
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
from weight_sync.transports.checksums import checksums_of, require_same, summed
from weight_sync.transports.process_group import (
    Meeting,
    Membership,
    Transfer,
    own_address,
    report_failure,
    serve_store,
)
from weight_sync.transports.sender import RankSender, Rows


class CollectiveSender(RankSender):
    """`publish` only says where to meet. `send` moves the bytes while the replicas receive."""

    transport = "collective"

    def __init__(self, rank: int, num_ranks: int, bucket_bytes: int, device: torch.device):
        """`bucket_bytes`: of all ranks' windows together, two of which are in memory. `device`: of the shards."""
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
        members = [f"trainer rank {rank}" for rank in range(self._num_ranks)]
        first_rank: dict[str, int] = {}
        for replica, num_workers in order.receivers.items():
            first_rank[replica] = len(members)
            members += [f"{replica} worker {worker}" for worker in range(num_workers)]
        meeting = Meeting(
            host=own_address(),
            port=self._store.port,
            nonce=order.nonce,
            timeout_s=order.timeout_s,
            bucket_bytes=self._bucket_bytes,
            members=tuple(members),
            first_rank=first_rank,
        )
        return meeting, None

    def send(self, shards: Shards, manifest: Manifest) -> Checksums:
        """Raises RuntimeError when a replica does not come, fails or is late."""
        strings, window = _windows(manifest)
        checksums: list[int] = []
        rows = summed(byte_layout.checked(shards(), strings[self._rank]), checksums)
        with self._membership.transfer(manifest.locations[0], self._rank) as transfer:
            self._send_windows(transfer, byte_layout.schedule(strings, window), window, rows)
            _exchange(transfer, checksums, self._num_ranks, self._device)
        return tuple(checksums)

    def _send_windows(self, transfer: Transfer, schedule: Iterator[tuple[int, int]], window: int, rows: Rows) -> None:
        """Sends this rank's windows, and takes part in the others': gloo passes them on through every member."""
        own = _Buffers(transfer, window, self._device)
        others = _Buffers(transfer, window if self._num_ranks > 1 else 0, self._device)
        packed = byte_layout.pack(rows, own.next)
        for rank, length in schedule:
            if rank == self._rank:
                next(packed)
                own.broadcast(length, rank)
            else:
                others.next()
                others.broadcast(length, rank)
        assert next(packed, None) is None
        own.wait()
        others.wait()

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
        found: list[list[int]] = []

        def tensors(transfer: Transfer) -> NamedTensors:
            joined = byte_layout.join(_Incoming(transfer, manifest, device).of_ranks(), entries)
            for entry, (name, tensor) in zip(entries, joined, strict=True):
                found.append(checksums_of(tensor, entry, num_ranks))
                yield name, tensor

        with self._membership.transfer(meeting, meeting.first_rank[worker.replica] + worker.index) as transfer:
            load(tensors(transfer))
            sent = _exchange(transfer, [0] * len(entries), num_ranks, device)
        for entry, of_tensor, expected in zip(entries, found, zip(*sent, strict=True), strict=True):
            require_same(entry.name, of_tensor, list(expected))
        return sent


class _Buffers:
    """Two windows: one is filled or read while the other is on its way."""

    def __init__(self, transfer: Transfer, nbytes: int, device: torch.device):
        self._transfer = transfer
        self._places = deque(torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        self._works: deque[Any] = deque()

    def next(self) -> torch.Tensor:
        """The buffer whose broadcast began first, when that broadcast is done."""
        if len(self._works) == len(self._places):
            self._transfer.wait(self._works.popleft())
        self._places.rotate(1)
        return self._places[0]

    def broadcast(self, length: int, root: int) -> Any:
        """Begins to broadcast the buffer that `next` gave."""
        work = self._transfer.broadcast(self._places[0][:length], root)
        self._works.append(work)
        return work

    def wait(self) -> None:
        for work in self._works:
            self._transfer.wait(work)


class _Incoming:
    """The windows of all ranks, in the order in which they are sent. While one is read, the next one comes."""

    def __init__(self, transfer: Transfer, manifest: Manifest, device: torch.device):
        self._transfer = transfer
        self._strings, window = _windows(manifest)
        self._schedule = byte_layout.schedule(self._strings, window)
        self._buffers = [_Buffers(transfer, window, device) for _ in self._strings]
        self._coming: deque[tuple[torch.Tensor, Any]] = deque()
        self._begin_next()

    def of_ranks(self) -> list[NamedTensors]:
        return [byte_layout.read(self._windows(), own) for own in self._strings]

    def _windows(self) -> Iterator[torch.Tensor]:
        while self._coming:
            window, work = self._coming.popleft()
            self._transfer.wait(work)
            self._begin_next()
            yield window

    def _begin_next(self) -> None:
        for rank, length in itertools.islice(self._schedule, 1):
            window = self._buffers[rank].next()[:length]
            self._coming.append((window, self._buffers[rank].broadcast(length, rank)))


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
