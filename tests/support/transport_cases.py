"""Trainer ranks and replicas' workers as threads of one process, with any transport between them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from weight_sync.protocol import (
    Checksums,
    Manifest,
    NamedTensors,
    PublishOrder,
    Receiver,
    ReceivingWorker,
    Sender,
    Shards,
    TensorSpec,
    merge,
)
from weight_sync.transports import byte_layout, collective
from weight_sync.transports import process_group as group
from weight_sync.transports.checksums import checksum
from weight_sync.transports.collective import CollectiveReceiver, CollectiveSender
from weight_sync.transports.filesystem import FilesystemReceiver, FilesystemSender
from weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender

Weights = dict[str, torch.Tensor]
_nonces = count(0xABC)


def weights(seed: int) -> Weights:
    """Every dtype and shape that is special. With a bucket of 1 KiB, `large` lies in several."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(7, 5, generator=generator).bfloat16(),
        "large": torch.randn(50, 16, generator=generator),
        "one_row": torch.randn(1, 4, generator=generator).half(),
        "scalar": torch.randn((), generator=generator).bfloat16(),
        "counts": torch.randint(-9, 9, (5,), generator=generator),
        "mask": torch.randint(0, 2, (3, 3), generator=generator).bool(),
        "nothing": torch.empty(0, 4),
        "bytes": torch.randint(0, 255, (3, 333), generator=generator).byte(),
        "special": torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45]),
    }


def local_rows(tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Return the rank's rows, as FSDP2 shards."""
    if tensor.ndim == 0:
        return tensor if rank == 0 else tensor.new_empty(0)
    chunks = torch.chunk(tensor, num_ranks)
    return chunks[rank] if rank < len(chunks) else tensor[:0]


@dataclass
class Update:
    """The outcome of one update: a value, or the error, of every rank's `send` and every worker's receiving."""

    manifest: Manifest
    sent: list[Checksums | BaseException] = field(default_factory=list)
    received: dict[tuple[str, int], Weights | BaseException] = field(default_factory=dict)

    @property
    def errors(self) -> list[str]:
        outcomes = [*self.sent, *self.received.values()]
        return [str(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]

    def assert_received(self, expected: Weights) -> None:
        assert self.errors == []
        for found in self.received.values():
            assert isinstance(found, dict)
            assert_same(found, expected)


class Fleet:
    """The same senders and receivers from update to update."""

    def __init__(
        self, make_sender: Callable[[int, int], Sender], make_receiver: Callable[[], Receiver], num_ranks: int
    ):
        self.num_ranks = num_ranks
        self.senders = [make_sender(rank, num_ranks) for rank in range(num_ranks)]
        self._make_receiver = make_receiver
        self.receivers: dict[tuple[str, int], Receiver] = {}

    def publish(self, new: Weights, global_steps: int, receivers: dict[str, int], **order: Any) -> Manifest:
        whole = PublishOrder(
            **{"base": None, "timeout_s": 5.0, **order},
            global_steps=global_steps,
            nonce=f"{next(_nonces):08x}",
            receivers=receivers,
        )
        specs = specs_of(new)
        return merge([sender.publish(specs, self.shards(new, rank), whole) for rank, sender in enumerate(self.senders)])

    def shards(self, new: Weights, rank: int) -> Shards:
        return lambda: ((name, local_rows(tensor, rank, self.num_ranks)) for name, tensor in new.items())

    def update(
        self,
        new: Weights,
        global_steps: int,
        receivers: dict[str, int],
        absent: str = "",
        stop: bool = False,
        **order: Any,
    ) -> Update:
        """`receivers`: replica -> workers. The workers of the replica `absent` do not come. `stop`: the senders, under
        way."""
        update = Update(self.publish(new, global_steps, receivers, **order))
        workers = [(name, index) for name, size in receivers.items() for index in range(size) if name != absent]
        with ThreadPoolExecutor(len(self.senders) + len(workers)) as threads:
            receiving = {worker: threads.submit(self.receive, worker, update.manifest) for worker in workers}
            if update.manifest.checksums is not None:
                update.sent = [*update.manifest.checksums]
            else:
                calls = [
                    threads.submit(sender.send, self.shards(new, rank), update.manifest)
                    for rank, sender in enumerate(self.senders)
                ]
                for sender in self.senders if stop else ():
                    sender.stop(update.manifest)
                update.sent = [_outcome(call) for call in calls]
            update.received = {worker: _outcome(call) for worker, call in receiving.items()}
        return update

    def receive(self, worker: tuple[str, int], manifest: Manifest) -> Weights:
        return receive(self.receivers.setdefault(worker, self._make_receiver()), manifest, *worker)


def receive(receiver: Receiver, manifest: Manifest, replica: str = "a", index: int = 0) -> Weights:
    """All that comes, copied."""
    found: Weights = {}

    def load(tensors: NamedTensors) -> None:
        found.update((name, tensor.clone()) for name, tensor in tensors)

    worker = ReceivingWorker(replica=replica, index=index, device="cpu")
    checksums = receiver.receive(manifest, worker, load)
    assert [len(of_rank) for of_rank in checksums] == [len(manifest.tensors)] * manifest.num_ranks
    assert manifest.checksums in (None, checksums)
    return found


def load_with(receiver: Receiver, manifest: Manifest, load: Callable[[NamedTensors], None]) -> None:
    receiver.receive(manifest, ReceivingWorker(replica="a", index=0, device="cpu"), load)


def pack(weights: Weights, num_ranks: int = 1) -> tuple[torch.Tensor, Manifest]:
    """The weights as one string of bytes, and the checksums of each rank's rows."""
    entries = byte_layout.layout(specs_of(weights))
    buffer = torch.full((byte_layout.length(entries),), 255, dtype=torch.uint8)
    for entry, tensor in zip(entries, weights.values(), strict=True):
        buffer[entry.offset : entry.offset + entry.nbytes] = byte_layout.as_bytes(tensor.contiguous())
    checksums = [
        tuple(checksum(local_rows(tensor, rank, num_ranks).contiguous()) for tensor in weights.values())
        for rank in range(num_ranks)
    ]
    manifest = Manifest(
        transport="",
        global_steps=1,
        nbytes=len(buffer),
        tensors=entries,
        locations=(None,) * num_ranks,
        checksums=tuple(checksums),
    )
    return buffer, manifest


def specs_of(weights: Weights) -> list[TensorSpec]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]


def _outcome(call: Future[Any]) -> Any:
    error = call.exception(timeout=20)
    return call.result() if error is None else error


def assert_same(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name


class LocalStore(HashStore):
    port = 0


@pytest.fixture
def local_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of collective, within this process: torch looks up the name of whom it connects to over TCP, which
    takes seconds where DNS is slow."""
    served: dict[int, LocalStore] = {}

    def serve() -> LocalStore:
        store = LocalStore()
        store.port = len(served)
        served[store.port] = store
        return store

    monkeypatch.setattr(collective, "serve_store", serve)
    monkeypatch.setattr(group, "connect_store", lambda host, port, timeout_s: served[port])


def make_sender(transport: str, directory: Path, rank: int, num_ranks: int) -> Sender:
    """Return a sender of the transport, with a bucket of 1 KiB where it has one."""
    match transport:
        case "shared_memory":
            return SharedMemorySender("run", rank, num_ranks)
        case "filesystem":
            return FilesystemSender("run", rank, num_ranks, directory)
        case _:
            return CollectiveSender(rank, num_ranks, 1024, torch.device("cpu"))


RECEIVERS: dict[str, Callable[[], Receiver]] = {
    "shared_memory": SharedMemoryReceiver,
    "filesystem": FilesystemReceiver,
    "collective": CollectiveReceiver,
}


def make_fleet(transport: str, directory: Path, num_ranks: int) -> Fleet:
    return Fleet(partial(make_sender, transport, directory), RECEIVERS[transport], num_ranks)
