"""The one place where transports are chosen. They are imported inside, because the driver does without torch."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import Transport, WeightSyncConfig
from weight_sync.protocol import Checksums, Load, Manifest, Receiver, ReceivingWorker, Sender

if TYPE_CHECKING:
    import torch

_receivers: dict[str, Receiver] = {}
"""This process's receivers, one per transport, because some keep a connection or the version before."""


def make_sender(config: WeightSyncConfig, owner: str, rank: int, num_ranks: int, device: "torch.device") -> Sender:
    """Return the sender of a trainer rank whose parameters are on `device`. `owner` names what this run publishes."""
    from weight_sync.transports import collective, cuda_ipc, delta, filesystem, shared_memory

    bucket_bytes = config.bucket_mb * 2**20
    if config.delta:
        inner = make_sender(replace(config, delta=False), owner, 0, 1, device)
        return delta.DeltaSender(inner, rank, num_ranks, device)
    match config.transport:
        case Transport.shared_memory:
            return shared_memory.SharedMemorySender(owner, rank, num_ranks)
        case Transport.collective:
            return collective.CollectiveSender(rank, num_ranks, bucket_bytes, device)
        case Transport.filesystem:
            assert config.directory is not None
            return filesystem.FilesystemSender(owner, rank, num_ranks, Path(config.directory))
        case Transport.cuda_ipc:
            return cuda_ipc.CudaIpcSender(rank, num_ranks, bucket_bytes, device)
        case Transport.vllm:
            from weight_sync.transports import vllm_native  # vLLM takes seconds

            assert config.vllm_backend is not None
            return vllm_native.VllmSender(config.vllm_backend, rank, num_ranks, bucket_bytes, device)


def receive(manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
    """Receive by the manifest's transport, as `Receiver.receive` says."""
    if manifest.transport not in _receivers:
        _receivers[manifest.transport] = make_receiver(manifest.transport)
    return _receivers[manifest.transport].receive(manifest, worker, load)


def make_receiver(transport: str) -> Receiver:
    from weight_sync.transports import collective, cuda_ipc, delta, filesystem, shared_memory

    if transport == "delta":
        return delta.DeltaReceiver(make_receiver)
    match Transport(transport):
        case Transport.shared_memory:
            return shared_memory.SharedMemoryReceiver()
        case Transport.collective:
            return collective.CollectiveReceiver()
        case Transport.filesystem:
            return filesystem.FilesystemReceiver()
        case Transport.cuda_ipc:
            return cuda_ipc.CudaIpcReceiver()
        case Transport.vllm:
            raise RuntimeError(
                "weight_sync.transport=vllm: only a replica of a run whose engine has the backend can receive, with "
                "weight_sync.staging=none"
            )
