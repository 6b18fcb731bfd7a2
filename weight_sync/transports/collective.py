"""Weights by torch.distributed broadcast: gloo through host memory, NCCL between GPUs, any number of machines.

Trainer ranks and the workers of all replicas form a group of their own, beside the default groups of either side, in
which every trainer rank broadcasts its own rows. NCCL needs a GPU for each member; on a shared one, cuda_ipc works.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weight_sync.protocol import Manifest
from weight_sync.transports import byte_layout as bucket
from weight_sync.transports import shard_layout as rows
from weight_sync.transports.base import Shards
from weight_sync.transports.byte_layout import Entry, Spec
from weight_sync.transports.process_group import Membership, Transfer, own_address, serve_store, tell_failure


class CollectiveSender:
    """`publish` only says where to meet. `send` moves the bytes, beside the replicas' receiving."""

    def __init__(self, rank: int, num_ranks: int, bucket_bytes: int, device: torch.device):
        """`bucket_bytes`: of all ranks' windows together, two of which are in memory. `device`: of the shards."""
        self._rank, self._num_ranks = rank, num_ranks
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._membership = Membership(device)
        self._store: Any = None

    def publish(self, specs: Sequence[Spec], shards: Shards, order: dict[str, Any]) -> Manifest:
        entries, nbytes = bucket.layout(specs)
        return {
            "transport": "collective",
            "global_steps": order["global_steps"],
            "nbytes": nbytes,
            "tensors": entries,
            "num_ranks": self._num_ranks,
            "location": self._meeting(order) if self._rank == 0 else None,
        }

    def _meeting(self, order: dict[str, Any]) -> dict[str, Any]:
        self._store = self._store or serve_store()
        members = [f"trainer rank {rank}" for rank in range(self._num_ranks)]
        first_rank: dict[str, int] = {}
        for replica, num_workers in order["receivers"].items():
            first_rank[replica] = len(members)
            members += [f"{replica} worker {worker}" for worker in range(num_workers)]
        return {
            "host": own_address(),
            "port": self._store.port,
            "nonce": order["nonce"],
            "timeout_s": order["timeout_s"],
            "backend": self._membership.backend,
            "bucket_bytes": self._bucket_bytes,
            "first_rank": first_rank,
            "members": members,
        }

    def send(self, shards: Shards, manifest: Manifest) -> list[int]:
        """Raises RuntimeError when a replica does not come, fails or is late."""
        strings, window = _windows(manifest)
        own = strings[self._rank]
        location = manifest["locations"][0]
        if not location["first_rank"]:  # nobody receives
            return [bucket.checksum(data) for _, data in rows.checked(shards(), own)]
        with self._membership.joined(location, self._rank) as transfer:
            checksums = self._send_windows(
                transfer, rows.schedule(strings, window), window, rows.checked(shards(), own)
            )
            for rank in range(self._num_ranks if own else 0):
                values = torch.tensor(checksums, dtype=torch.int64, device=self._device)
                transfer.wait(transfer.broadcast(values, rank))
        return checksums

    def _send_windows(
        self,
        transfer: Transfer,
        schedule: Iterator[tuple[int, int]],
        window: int,
        tensors: Iterator[tuple[Entry, torch.Tensor]],
    ) -> list[int]:
        """This rank's windows, and those of the others: gloo passes them on through every member."""
        own = _Buffers(transfer, window, self._device)
        others = _Buffers(transfer, window if self._num_ranks > 1 else 0, self._device)
        checksums: list[int] = []
        packed = rows.pack(tensors, own.next, checksums)
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
        return checksums

    def stop(self, manifest: Manifest) -> None:
        if self._store is not None:  # rank 0 tells all
            tell_failure(self._store, manifest["locations"][0]["nonce"], "the trainer stopped sending")

    def close(self) -> None:
        self._membership.leave()
        self._store = None


class CollectiveReceiver:
    def __init__(self) -> None:
        self._membership: Membership | None = None

    def tensors(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """On the GPU that the bytes came to, or on the host. Verified after the last one, when the checksums come."""
        location = manifest["locations"][0]
        device = _device(location["backend"], manifest["device"])
        if manifest["replica"] not in location["first_rank"]:
            expected = sorted(location["first_rank"])
            raise RuntimeError(f"{manifest['replica']} is not among the receivers of this version: {expected}")
        if self._membership is None:
            self._membership = Membership(device)
        rank = location["first_rank"][manifest["replica"]] + manifest["worker"]
        entries, num_ranks = manifest["tensors"], manifest["num_ranks"]
        found: list[list[int]] = []
        with self._membership.joined(location, rank) as transfer:
            for entry, (name, tensor) in zip(entries, _Incoming(transfer, manifest, device).tensors(), strict=True):
                found.append(bucket.checksums_of(tensor, entry, num_ranks))
                yield name, tensor
            manifest["checksums"] = [_checksums(transfer, root, len(entries), device) for root in range(num_ranks)]
        for entry, of_tensor, expected in zip(entries, found, zip(*manifest["checksums"], strict=True), strict=True):
            if of_tensor != list(expected):
                raise RuntimeError(f"{entry[0]} came with checksums {of_tensor}, sent were {list(expected)}")


class _Buffers:
    """Two windows: one is filled or read while the other is on its way."""

    def __init__(self, transfer: Transfer, nbytes: int, device: torch.device):
        self._transfer = transfer
        self._places = deque(torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        self._works: deque[Any] = deque()

    def next(self) -> torch.Tensor:
        """The one whose broadcast began first, when that is done."""
        if len(self._works) == len(self._places):
            self._transfer.wait(self._works.popleft())
        self._places.rotate(1)
        return self._places[0]

    def broadcast(self, length: int, root: int) -> Any:
        """Of the one that `next` gave."""
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
        self._entries = manifest["tensors"]
        self._strings, window = _windows(manifest)
        self._schedule = rows.schedule(self._strings, window)
        self._buffers = [_Buffers(transfer, window, device) for _ in self._strings]
        self._coming: deque[tuple[int, torch.Tensor, Any]] = deque()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._begin_next()
        of_ranks = [bucket.read(self._windows_of(rank), own) for rank, own in enumerate(self._strings)]
        return rows.join(of_ranks, self._entries)

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


def _checksums(transfer: Transfer, root: int, count: int, device: torch.device) -> list[int]:
    values = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        transfer.wait(transfer.broadcast(values, root))
    return values.tolist()


def _windows(manifest: Manifest) -> tuple[list[list[Entry]], int]:
    """Every rank's string, and the length of their windows in bytes."""
    num_ranks = manifest["num_ranks"]
    strings = [rows.layout(manifest["tensors"], rank, num_ranks) for rank in range(num_ranks)]
    longest = max(rows.length(own) for own in strings)
    return strings, min(rows.window_bytes(manifest["locations"][0]["bucket_bytes"], num_ranks), longest)


def _device(backend: str, own: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if not own.startswith("cuda"):
        raise RuntimeError(
            f"weight_sync.transport=collective: the trainer sends from GPUs, by NCCL, but this replica is on {own}"
        )
    return torch.device(own)
