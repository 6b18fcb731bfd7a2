"""Weights within one machine's GPUs: the trainer keeps a copy of its rows on the GPU, and replicas map that memory.

Nothing is sent: a replica maps the memory into its own GPU's address space and copies from there, over NVLink or PCIe.
On one GPU (`gpu_share`) it is the same memory. Ray shows each process its own GPUs alone, and CUDA opens handles of
others too, where the GPUs can reach one another.
Never run so far: written after torch/csrc/StorageSharing.cpp and vLLM's IPC weight transfer.
"""

import base64
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weight_sync.protocol import Manifest
from weight_sync.transports import byte_layout as bucket
from weight_sync.transports import shard_layout as rows
from weight_sync.transports.base import Shards
from weight_sync.transports.byte_layout import Spec


class CudaIpcSender:
    """The copy is in buffers of a bucket's size, used again for every version: what replicas map stays valid. Replicas
    open as many as the version needs."""

    def __init__(self, rank: int, num_ranks: int, bucket_bytes: int, device: torch.device):
        if device.type != "cuda":
            raise ValueError(
                f"weight_sync.transport=cuda_ipc: the trainer is on {device}; without GPUs, shared_memory, collective "
                "and filesystem work"
            )
        self._rank, self._num_ranks = rank, num_ranks
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._handles: list[list[Any]] = []

    def publish(self, specs: Sequence[Spec], shards: Shards, order: dict[str, Any]) -> Manifest:
        entries, nbytes = bucket.layout(specs)
        own = rows.layout(entries, self._rank, self._num_ranks)
        self._reserve(rows.length(own))
        checksums: list[int] = []
        for _ in rows.pack(rows.checked(shards(), own), iter(self._buffers).__next__, checksums):
            pass
        torch.cuda.synchronize(self._device)  # who maps the memory waits for no stream of ours
        return {
            "transport": "cuda_ipc",
            "global_steps": order["global_steps"],
            "nbytes": nbytes,
            "tensors": entries,
            "num_ranks": self._num_ranks,
            "location": {"host": socket.gethostname(), "handles": self._handles},
            "checksums": checksums,
        }

    def _reserve(self, nbytes: int) -> None:
        """Room for at least so much. What changed since a version, with `delta`, is less than the whole version, which
        came first: so handles are exported once. Memory whose handle nobody has opened torch never gives back."""
        if sum(len(buffer) for buffer in self._buffers) >= nbytes:
            return
        size = rows.window_bytes(self._bucket_bytes, 1)
        sizes = [min(size, nbytes - begin) for begin in range(0, nbytes, size)]
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        self._handles = [_export(buffer) for buffer in self._buffers]

    def send(self, shards: Shards, manifest: Manifest) -> list[int]:
        return manifest["checksums"][self._rank]

    def stop(self, manifest: Manifest) -> None:
        """Nobody waits for anybody."""

    def close(self) -> None:
        self._buffers, self._handles = [], []
        torch.cuda.ipc_collect()


class CudaIpcReceiver:
    def tensors(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the trainer's memory. Raises RuntimeError where it cannot be mapped."""
        device, host = torch.device(manifest["device"]), manifest["locations"][0]["host"]
        if device.type != "cuda" or host != socket.gethostname():
            raise RuntimeError(
                f"weight_sync.transport=cuda_ipc: the trainer's GPUs are on {host}, this replica is on {device} of "
                f"{socket.gethostname()}; between machines collective works"
            )
        entries, num_ranks = manifest["tensors"], manifest["num_ranks"]
        of_ranks = []
        for rank, location in enumerate(manifest["locations"]):
            windows = _opened(location["handles"], rank, device)
            of_ranks.append(bucket.read(windows, rows.layout(entries, rank, num_ranks)))
        return bucket.verified(rows.join(of_ranks, entries), manifest)


def _opened(handles: Sequence[Sequence[Any]], rank: int, device: torch.device) -> Iterator[torch.Tensor]:
    for handle in handles:
        try:
            window = _open(handle, device)
        except RuntimeError as error:
            raise RuntimeError(
                f"weight_sync.transport=cuda_ipc: this replica's GPU cannot map the memory of trainer rank {rank}'s "
                f"({str(error).splitlines()[0]}); shared_memory and collective need no access between GPUs"
            ) from error
        yield window


def _export(buffer: torch.Tensor) -> list[Any]:
    """Plain values for `_open` in another process. The buffer must live for as long as they are used."""
    # Its own device, which has another number there, and whether to wait for its event: `publish` waits itself.
    _, *values, _ = buffer.untyped_storage()._share_cuda_()
    return [base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in values]


def _open(handle: Sequence[Any], device: torch.device) -> torch.Tensor:
    """On `device`, wherever the memory is."""
    values = [base64.b64decode(value) if isinstance(value, str) else value for value in handle]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *values, False)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
