"""Every transport keeps the same promises."""

from pathlib import Path

import pytest
import torch

from tests.support.transport_cases import (
    RECEIVERS,
    assert_same,
    load_with,
    local_rows,
    make_fleet,
    receive,
    weights,
)
from weight_sync.protocol import Manifest
from weight_sync.transports.checksums import checksum
from weight_sync.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from weight_sync.transports.locations import GpuMemory

pytestmark = pytest.mark.usefixtures("local_store")


@pytest.mark.parametrize(("num_ranks", "workers"), [(1, (1,)), (1, (1, 1, 1)), (2, (2, 1)), (4, (1, 1, 1))])
@pytest.mark.parametrize("transport", RECEIVERS)
def test_three_versions_arrive_bit_by_bit(
    transport: str, num_ranks: int, workers: tuple[int, ...], directory: Path
) -> None:
    fleet = make_fleet(transport, directory, num_ranks)
    receivers = {f"replica-{index}": count for index, count in enumerate(workers)}
    for global_steps in (1, 2, 3):
        new = weights(seed=global_steps)
        update = fleet.update(new, global_steps, receivers)
        update.assert_received(new)
        assert list(update.received) == [(name, index) for name, count in receivers.items() for index in range(count)]
        num_bytes = sum(tensor.nbytes for tensor in new.values())
        assert update.manifest.nbytes == num_bytes, "however many ranks send a part of it"
        assert (update.manifest.transport, update.manifest.global_steps) == (transport, global_steps)
        assert update.sent == [
            tuple(checksum(local_rows(tensor, rank, num_ranks).contiguous()) for tensor in new.values())
            for rank in range(num_ranks)
        ]


@pytest.mark.parametrize("transport", RECEIVERS)
def test_rows_that_were_not_announced_are_refused(transport: str, directory: Path) -> None:
    """Nothing is cast on the way."""
    fleet = make_fleet(transport, directory, num_ranks=1)
    fleet.shards = lambda *_: lambda: iter([("embed", torch.ones(3, 2))])  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"expected 12 bytes of \('embed', 'bfloat16'.* got \('embed', 'float32', 24\)"
    ):
        for outcome in fleet.update({"embed": torch.ones(3, 2).bfloat16()}, 1, {"a": 1}).sent:
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
        locations=(GpuMemory("node-17", ()),),
        checksums=((),),
    )
    with pytest.raises(RuntimeError, match=r"cuda_ipc: the trainer's GPUs are on node-17, this replica is on cpu of "):
        receive(CudaIpcReceiver(), manifest)


def file_of(manifest: Manifest) -> Path:
    """The file that holds the rows of the last rank."""
    location = manifest.locations[-1]
    return Path(getattr(location, "path", location))


@pytest.mark.parametrize("transport", ["shared_memory", "filesystem"])
def test_readers_cannot_write_into_the_weights_of_others(transport: str, directory: Path) -> None:
    manifest = make_fleet(transport, directory, num_ranks=1).publish(weights(1), 1, {})
    load_with(RECEIVERS[transport](), manifest, lambda tensors: [tensor.zero_() for _, tensor in tensors])
    assert_same(receive(RECEIVERS[transport](), manifest), weights(1))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "filesystem"])
def test_a_byte_that_changed_names_its_tensor(transport: str, directory: Path) -> None:
    manifest = make_fleet(transport, directory, num_ranks=2).publish(weights(1), 1, {})
    content = file_of(manifest).read_bytes()
    place = content.index(weights(1)["large"][25:].numpy().tobytes()) + 9
    with file_of(manifest).open("r+b") as file:
        file.seek(place)
        file.write(bytes([content[place] ^ 1]))
    with pytest.raises(RuntimeError, match="large came with checksums"):
        receive(RECEIVERS[transport](), manifest)
