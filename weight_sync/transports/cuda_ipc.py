"""Weights within one machine's GPUs: the trainer keeps a copy of its rows on the GPU, and replicas map that memory.

Nothing is sent: a replica maps the memory into its own GPU's address space and copies from there, over NVLink or PCIe.
On one GPU (`gpu_share`) it is the same memory. Ray shows each process its own GPUs alone, and CUDA opens handles of
others too, where the GPUs can reach one another.
Never run until now: written after torch/csrc/StorageSharing.cpp and vLLM's IPC weight transfer.
"""

from collections.abc import Sequence
from typing import Any

import torch

from weight_sync.protocol import Checksums, Load, Manifest, PublishOrder, Receiver, ReceivingWorker, TensorEntry
from weight_sync.transports.byte_layout import join, length, pack, rank_layout, read, window_bytes
from weight_sync.transports.checksums import load_verified, summed
from weight_sync.transports.locations import GpuMemory, this_machine
from weight_sync.transports.sender import RankSender, Rows


class CudaIpcSender(RankSender):
    """The copy is in buffers of a bucket's size, which serve every version: what replicas map stays valid. Replicas
    open as many as the version needs."""

    transport = "cuda_ipc"

    def __init__(self, rank: int, num_ranks: int, bucket_bytes: int, device: torch.device):
        if device.type != "cuda":
            raise ValueError(
                f"weight_sync.transport=cuda_ipc: the trainer is on {device}; without GPUs, shared_memory, collective "
                "and filesystem work"
            )
        super().__init__(rank, num_ranks)
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._handles: tuple[tuple[Any, ...], ...] = ()

    def _offer(
        self, entries: Sequence[TensorEntry], rows: Rows, order: PublishOrder
    ) -> tuple[GpuMemory, Sequence[int]]:
        self._reserve(length(rank_layout(entries, self._rank, self._num_ranks)))
        checksums: list[int] = []
        for _ in pack(summed(rows, checksums), iter(self._buffers).__next__):
            pass
        torch.cuda.synchronize(self._device)  # a replica that maps the memory waits for no stream of this process
        return GpuMemory(this_machine(), self._handles), checksums

    def _reserve(self, nbytes: int) -> None:
        """Room for at least so many bytes. Handles are exported once, because torch never gives back memory whose
        handle no process has opened. With `delta` this still holds: the first version is whole, and the largest."""
        if sum(len(buffer) for buffer in self._buffers) >= nbytes:
            return
        size = window_bytes(self._bucket_bytes, 1)
        sizes = [min(size, nbytes - begin) for begin in range(0, nbytes, size)]
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        # Without their device, which has another number elsewhere, and whether to wait for their event: `_offer` does.
        self._handles = tuple(buffer.untyped_storage()._share_cuda_()[1:-1] for buffer in self._buffers)


class CudaIpcReceiver(Receiver):
    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        """Loads views of the trainer's memory. Raises RuntimeError where it cannot be mapped."""
        device, host = torch.device(worker.device), manifest.locations[0].host
        if device.type != "cuda" or host != this_machine():
            raise RuntimeError(
                f"weight_sync.transport=cuda_ipc: the trainer's GPUs are on {host}, this replica is on {device} of "
                f"{this_machine()}; between machines collective works"
            )
        # All memory is mapped before anything is loaded, and until the last copy of it has ended.
        strings = [rank_layout(manifest.tensors, rank, manifest.num_ranks) for rank in range(manifest.num_ranks)]
        buffers = [
            _opened(memory.handles, length(own), rank, device)
            for rank, (memory, own) in enumerate(zip(manifest.locations, strings, strict=True))
        ]
        rank_parts = [read(opened, own) for opened, own in zip(buffers, strings, strict=True)]
        try:
            return load_verified(join(rank_parts, manifest.tensors), manifest, load)
        finally:
            torch.cuda.current_stream(device).synchronize()


def _opened(handles: Sequence[tuple[Any, ...]], nbytes: int, rank: int, device: torch.device) -> list[torch.Tensor]:
    """The buffers that hold so many bytes, on `device`, wherever the memory is."""
    torch.cuda.init()  # what opens handles reads tables that are empty before
    opened: list[torch.Tensor] = []
    for handle in handles:
        if sum(map(len, opened)) >= nbytes:
            break
        try:
            storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *handle, False)
        except RuntimeError as error:
            raise RuntimeError(
                f"weight_sync.transport=cuda_ipc: this replica's GPU cannot map the memory of trainer rank {rank}'s "
                f"({str(error).splitlines()[0]}); shared_memory and collective need no access between GPUs"
            ) from error
        opened.append(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
    return opened
