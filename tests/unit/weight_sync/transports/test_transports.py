"""What every transport does the same."""

from pathlib import Path

import pytest
import torch

from tests.support.transport_cases import RECEIVERS, local_store, make_fleet, receive, rows_of, weights  # noqa: F401
from weight_sync.protocol import GpuMemory, Manifest
from weight_sync.transports import cleanup
from weight_sync.transports.checksums import checksum
from weight_sync.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender

pytestmark = pytest.mark.usefixtures("local_store")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cleanup, "DIRECTORY", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(1, 1), (1, 3), (2, 1), (4, 3)])
@pytest.mark.parametrize("transport", RECEIVERS)
def test_three_versions_arrive_bit_by_bit(transport: str, num_ranks: int, num_replicas: int, directory: Path) -> None:
    fleet = make_fleet(transport, directory, num_ranks)
    receivers = {f"replica-{index}": 1 for index in range(num_replicas)}
    for global_steps in (1, 2, 3):
        new = weights(seed=global_steps)
        update = fleet.update(new, global_steps, receivers)
        update.assert_received(new)
        assert len(update.received) == num_replicas
        num_bytes = sum(tensor.nbytes for tensor in new.values())
        assert update.manifest.nbytes == num_bytes, "however many ranks send a part of it"
        assert (update.manifest.transport, update.manifest.global_steps) == (transport, global_steps)
        assert update.sent == [
            tuple(checksum(rows_of(tensor, rank, num_ranks).contiguous()) for tensor in new.values())
            for rank in range(num_ranks)
        ]


@pytest.mark.parametrize("transport", RECEIVERS)
def test_every_worker_of_a_replica_receives(transport: str, directory: Path) -> None:
    fleet = make_fleet(transport, directory, num_ranks=2)
    update = fleet.update(weights(1), 1, {"a": 2, "b": 1})
    update.assert_received(weights(1))
    assert list(update.received) == [("a", 0), ("a", 1), ("b", 0)]


@pytest.mark.parametrize("transport", RECEIVERS)
def test_rows_that_were_not_announced_are_refused(transport: str, directory: Path) -> None:
    """Nothing is cast on the way."""
    fleet = make_fleet(transport, directory, num_ranks=1)
    fleet.shards = lambda *_: lambda: iter([("embed", torch.ones(3, 2))])  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"expected 12 bytes of \('embed', 'bfloat16'.* got \('embed', 'float32', 24\)"
    ):
        for outcome in fleet.update({"embed": torch.ones(3, 2).bfloat16()}, 1, {}).sent:
            assert isinstance(outcome, BaseException)
            raise outcome


def test_cuda_ipc_needs_gpus_on_both_sides_and_says_so() -> None:
    with pytest.raises(ValueError, match=r"weight_sync\.transport=cuda_ipc: the trainer is on cpu; without GPUs"):
        CudaIpcSender(0, 1, 1024, torch.device("cpu"))
    manifest = Manifest(
        transport="cuda_ipc",
        global_steps=1,
        nbytes=0,
        tensors=(),
        locations=(GpuMemory(host="node-17", handles=()),),
        checksums=((),),
    )
    with pytest.raises(RuntimeError, match=r"cuda_ipc: the trainer's GPUs are on node-17, this replica is on cpu of "):
        receive(CudaIpcReceiver(), manifest)
