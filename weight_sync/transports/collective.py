"""Weights by torch.distributed broadcast: gloo through host memory, NCCL between GPUs, any number of machines.

Trainer ranks and the workers of all replicas form a process group apart from the default groups of either side, in
which every trainer rank broadcasts its own rows. NCCL needs a GPU for each member; on a shared one, cuda_ipc works.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weight_sync.protocol import (
    Checksums,
    Load,
    Manifest,
    Meeting,
    NamedTensors,
    Publication,
    PublishOrder,
    Receiver,
    ReceivingWorker,
    Sender,
    Shards,
    TensorEntry,
    TensorSpec,
)
from weight_sync.transports import byte_layout
from weight_sync.transports.checksums import checksums_of, require_same, summed
from weight_sync.transports.process_group import Membership, Transfer, own_address, report_failure, serve_store


class CollectiveSender(Sender):
    """`publish` only says where to meet. `send` moves the bytes while the replicas receive."""

    def __init__(self, rank: int, num_ranks: int, bucket_bytes: int, device: torch.device):
        """`bucket_bytes`: of all ranks' windows together, two of which are in memory. `device`: of the shards."""
        self._rank, self._num_ranks = rank, num_ranks
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._membership = Membership(device)
        self._store: Any = None

    def publish(self, specs: Sequence[TensorSpec], shards: Shards, order: PublishOrder) -> Publication:
        entries, _ = byte_layout.layout(specs)
        return Publication(
            transport="collective",
            global_steps=order.global_steps,
            nbytes=sum(entry.nbytes for entry in byte_layout.rank_layout(entries, self._rank, self._num_ranks)),
            tensors=entries,
            location=self._meeting(order) if self._rank == 0 else None,
            checksums=None,
        )

    def _meeting(self, order: PublishOrder) -> Meeting:
        self._store = self._store or serve_store()
        members = [f"trainer rank {rank}" for rank in range(self._num_ranks)]
        first_rank: dict[str, int] = {}
        for replica, num_workers in order.receivers.items():
            first_rank[replica] = len(members)
            members += [f"{replica} worker {worker}" for worker in range(num_workers)]
        return Meeting(
            host=own_address(),
            port=self._store.port,
            nonce=order.nonce,
            timeout_s=order.timeout_s,
            backend=self._membership.backend,
            bucket_bytes=self._bucket_bytes,
            members=tuple(members),
            first_rank=first_rank,
        )

    def send(self, shards: Shards, manifest: Manifest) -> Checksums:
        """Raises RuntimeError when a replica does not come, fails or is late."""
        [meeting] = manifest.located(Meeting)
        strings, window = _windows(manifest, meeting)
        own = strings[self._rank]
        checksums: list[int] = []
        rows = summed(shards(), own, checksums)
        if not meeting.first_rank:  # there is no receiver
            deque(rows, maxlen=0)
            return tuple(checksums)
        with self._membership.transfer(meeting, self._rank) as transfer:
            self._send_windows(transfer, byte_layout.schedule(strings, window), window, rows)
            for rank in range(self._num_ranks if own else 0):
                values = torch.tensor(checksums, dtype=torch.int64, device=self._device)
                transfer.wait(transfer.broadcast(values, rank))
        return tuple(checksums)

    def _send_windows(
        self,
        transfer: Transfer,
        schedule: Iterator[tuple[int, int]],
        window: int,
        rows: Iterator[tuple[TensorEntry, torch.Tensor]],
    ) -> None:
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
            [meeting] = manifest.located(Meeting)
            report_failure(self._store, meeting.nonce, "the trainer stopped sending")


class CollectiveReceiver(Receiver):
    def __init__(self) -> None:
        self._membership: Membership | None = None

    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        """Loads from the GPU that the bytes came to, or from the host. The tensors are verified after the last one,
        when the checksums come."""
        [meeting] = manifest.located(Meeting)
        device = _device(meeting.backend, worker.device)
        if worker.replica not in meeting.first_rank:
            expected = sorted(meeting.first_rank)
            raise RuntimeError(f"{worker.replica} is not among the receivers of this version: {expected}")
        if self._membership is None:
            self._membership = Membership(device)
        entries, num_ranks = manifest.tensors, manifest.num_ranks
        found: list[list[int]] = []

        def tensors(transfer: Transfer) -> NamedTensors:
            incoming = _Incoming(transfer, manifest, meeting, device).tensors()
            for entry, (name, tensor) in zip(entries, incoming, strict=True):
                found.append(checksums_of(tensor, entry, num_ranks))
                yield name, tensor

        with self._membership.transfer(meeting, meeting.first_rank[worker.replica] + worker.index) as transfer:
            load(tensors(transfer))
            if len(found) < len(entries):  # the other members would wait for this one until the deadline
                raise RuntimeError(f"{entries[len(found)].name} was not loaded, nor what follows it")
            sent = tuple(_checksums(transfer, root, len(entries), device) for root in range(num_ranks))
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

    def __init__(self, transfer: Transfer, manifest: Manifest, meeting: Meeting, device: torch.device):
        self._transfer = transfer
        self._entries = manifest.tensors
        self._strings, window = _windows(manifest, meeting)
        self._schedule = byte_layout.schedule(self._strings, window)
        self._buffers = [_Buffers(transfer, window, device) for _ in self._strings]
        self._coming: deque[tuple[int, torch.Tensor, Any]] = deque()

    def tensors(self) -> NamedTensors:
        self._begin_next()
        of_ranks = [byte_layout.read(self._windows_of(rank), own) for rank, own in enumerate(self._strings)]
        return byte_layout.join(of_ranks, self._entries)

    def _windows_of(self, rank: int) -> Iterator[torch.Tensor]:
        while self._coming:
            root, window, work = self._coming.popleft()
            assert root == rank
            self._transfer.wait(work)
            self._begin_next()
            yield window

    def _begin_next(self) -> None:
        rank, length = next(self._schedule, (0, 0))
        if length:
            window = self._buffers[rank].next()[:length]
            self._coming.append((rank, window, self._buffers[rank].broadcast(length, rank)))


def _checksums(transfer: Transfer, root: int, count: int, device: torch.device) -> Checksums:
    values = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        transfer.wait(transfer.broadcast(values, root))
    return tuple(values.tolist())


def _windows(manifest: Manifest, meeting: Meeting) -> tuple[list[tuple[TensorEntry, ...]], int]:
    """Every rank's string, and the length of their windows in bytes."""
    num_ranks = manifest.num_ranks
    strings = [byte_layout.rank_layout(manifest.tensors, rank, num_ranks) for rank in range(num_ranks)]
    longest = max(byte_layout.length(own) for own in strings)
    return strings, min(byte_layout.window_bytes(meeting.bucket_bytes, num_ranks), longest)


def _device(backend: str, own: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if not own.startswith("cuda"):
        raise RuntimeError(
            f"weight_sync.transport=collective: the trainer sends from GPUs, by NCCL, but this replica is on {own}"
        )
    return torch.device(own)
