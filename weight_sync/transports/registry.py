"""The one place where transports are chosen. Each is imported where it is used: the driver does without torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import Transport, WeightSyncConfig
from weight_sync.protocol import Checksums, Manifest, NamedTensors, Receiver, ReceivingWorker, Sender

if TYPE_CHECKING:
    import torch

_receivers: dict[str, Receiver] = {}
"""This process's receivers, one per transport, because some keep a connection or the version before."""


def make_sender(config: WeightSyncConfig, owner: str, rank: int, num_ranks: int, device: "torch.device") -> Sender:
    """The sender of a trainer rank whose parameters are on `device`. `owner` names what this run publishes."""
    if not config.delta:
        return _make_sender(config, owner, rank, num_ranks, device)
    from weight_sync.transports.delta import DeltaSender

    return DeltaSender(_make_sender(config, owner, 0, 1, device), rank, num_ranks, device)


def _make_sender(config: WeightSyncConfig, owner: str, rank: int, num_ranks: int, device: "torch.device") -> Sender:
    bucket_bytes = config.bucket_mb * 2**20
    match config.transport:
        case Transport.shared_memory:
            from weight_sync.transports.shared_memory import SharedMemorySender

            return SharedMemorySender(owner, rank, num_ranks)
        case Transport.collective:
            from weight_sync.transports.collective import CollectiveSender

            return CollectiveSender(rank, num_ranks, bucket_bytes, device)
        case Transport.filesystem:
            from weight_sync.transports.filesystem import FilesystemSender

            assert config.directory is not None
            return FilesystemSender(owner, rank, num_ranks, Path(config.directory))
        case Transport.cuda_ipc:
            from weight_sync.transports.cuda_ipc import CudaIpcSender

            return CudaIpcSender(rank, num_ranks, bucket_bytes, device)


def receive(manifest: Manifest, worker: ReceivingWorker, load: Callable[[NamedTensors], None]) -> tuple[Checksums, ...]:
    """Receives by the manifest's transport: see `Receiver.receive`."""
    if manifest.transport not in _receivers:
        _receivers[manifest.transport] = _make_receiver(manifest.transport)
    return _receivers[manifest.transport].receive(manifest, worker, load)


def _make_receiver(transport: str) -> Receiver:
    if transport == "delta":
        from weight_sync.transports.delta import DeltaReceiver

        return DeltaReceiver(_make_receiver)
    match Transport(transport):
        case Transport.shared_memory:
            from weight_sync.transports.shared_memory import SharedMemoryReceiver

            return SharedMemoryReceiver()
        case Transport.collective:
            from weight_sync.transports.collective import CollectiveReceiver

            return CollectiveReceiver()
        case Transport.filesystem:
            from weight_sync.transports.filesystem import FilesystemReceiver

            return FilesystemReceiver()
        case Transport.cuda_ipc:
            from weight_sync.transports.cuda_ipc import CudaIpcReceiver

            return CudaIpcReceiver()


def release_all(config: WeightSyncConfig, owner: str) -> None:
    """Remove what `owner` published and nobody removed, as after a crash; of shared memory, also what any other run
    left whose processes are all gone."""
    from weight_sync.transports import filesystem, shared_memory

    shared_memory.release_all(owner)
    shared_memory.sweep()
    if config.directory is not None:
        filesystem.release_all(Path(config.directory), owner)
