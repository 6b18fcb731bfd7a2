"""The order in which a replica maps the trainer's GPU memory, copies from it and lets go, on memory of the host."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.transport_cases import assert_same, local_rows, specs_of, weights
from weight_sync.protocol import Manifest, NamedTensors, ReceivingWorker
from weight_sync.transports import cuda_ipc
from weight_sync.transports.byte_layout import checked, layout, length, pack, rank_layout
from weight_sync.transports.checksums import summed
from weight_sync.transports.locations import GpuMemory, this_machine

NUM_RANKS, BUFFER = 2, 1024


def test_all_memory_is_mapped_before_the_first_tensor_and_until_the_copies_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    buffers: list[torch.Tensor] = []

    def opened(device: int, number: int, must_wait: bool) -> torch.UntypedStorage:
        events.append("opened")
        return buffers[number].untyped_storage()

    stream = SimpleNamespace(synchronize=lambda: events.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "init", lambda: events.append("initialized"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(opened))
    monkeypatch.setattr(cuda_ipc.torch, "empty", _on_host(torch.empty))
    new, received = weights(1), dict[str, torch.Tensor]()

    def load(tensors: NamedTensors) -> None:
        for name, tensor in tensors:
            events.append("loaded")
            received[name] = tensor.clone()

    worker = ReceivingWorker(replica="a", index=0, device="cuda:0")
    cuda_ipc.CudaIpcReceiver().receive(_manifest(new, buffers), worker, load)
    assert_same(received, new)
    first, opens = events.index("loaded"), events.count("opened")
    assert opens == len(buffers) - NUM_RANKS and events[first:] == ["loaded"] * len(new) + ["synchronized"]
    assert events[0] == "initialized", "torch's tables of mapped memory are empty before"


def _manifest(new: dict[str, torch.Tensor], buffers: list[torch.Tensor]) -> Manifest:
    """Put every rank's rows into buffers, whose handles are their numbers, of which the last is not needed."""
    entries = layout(specs_of(new))
    locations: list[GpuMemory] = []
    checksums: list[tuple[int, ...]] = []
    for rank in range(NUM_RANKS):
        own, sums = rank_layout(entries, rank, NUM_RANKS), list[int]()
        places = [torch.empty(BUFFER, dtype=torch.uint8) for _ in range(-(-length(own) // BUFFER) + 1)]
        rows = checked(((name, local_rows(tensor, rank, NUM_RANKS)) for name, tensor in new.items()), own)
        for _ in pack(summed(rows, sums), iter(places).__next__):
            pass
        handles = tuple((len(buffers) + index,) for index in range(len(places)))
        buffers += places
        locations.append(GpuMemory(this_machine(), handles))
        checksums.append(tuple(sums))
    return Manifest(
        transport="cuda_ipc",
        global_steps=1,
        nbytes=sum(entry.nbytes for entry in entries),
        tensors=entries,
        locations=tuple(locations),
        checksums=tuple(checksums),
    )


def _on_host(empty: Any) -> Any:
    return lambda *size, device=None, **options: empty(*size, **options)
