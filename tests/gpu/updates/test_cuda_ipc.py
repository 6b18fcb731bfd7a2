"""Weights through memory of one GPU, mapped by another process. Skipped without a GPU."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fakes import make_order
from tests.support.transport_cases import assert_same, specs_of, weights
from weight_sync.protocol import Manifest
from weight_sync.transports.cuda_ipc import CudaIpcSender

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RECEIVE = """
import pickle, sys, torch
from weight_sync.protocol import ReceivingWorker
from weight_sync.transports.cuda_ipc import CudaIpcReceiver
receiver, worker = CudaIpcReceiver(), ReceivingWorker(replica="a", index=0, device="cuda:0")
for number, line in enumerate(sys.stdin):
    try:
        found = {}
        load = lambda tensors: found.update((name, tensor.cpu()) for name, tensor in tensors)
        receiver.receive(pickle.loads(bytes.fromhex(line)), worker, load)
    except RuntimeError as error:
        found = str(error)
    torch.save(found, f"{sys.argv[1]}/{number}")
    print("done", flush=True)
"""


class Replica:
    """A process that receives as often as it is told to."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0
        folder.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-c", RECEIVE, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def receive(self, manifest: Manifest) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(pickle.dumps(manifest).hex() + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"
        self._count += 1
        return torch.load(self._folder / str(self._count - 1))

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    started = [Replica(tmp_path / str(index)) for index in range(2)]
    yield started
    for replica in started:
        replica.end()


def publish(sender: CudaIpcSender, seed: int) -> Manifest:
    new = {name: tensor.cuda() for name, tensor in weights(seed).items()}
    return sender.publish(specs_of(new), lambda: iter(new.items()), make_order(seed))


def test_three_versions_arrive_bit_by_bit_at_two_replicas(replicas: list[Replica]) -> None:
    sender = CudaIpcSender(0, 1, bucket_bytes=1024, device=torch.device("cuda:0"))
    for seed in (1, 2, 3):
        manifest = publish(sender, seed)
        assert len(manifest.locations[0].handles) > 3
        for replica in replicas:
            assert_same(replica.receive(manifest), weights(seed))


def test_a_byte_that_changed_names_its_tensor(replicas: list[Replica]) -> None:
    sender = CudaIpcSender(0, 1, bucket_bytes=1024, device=torch.device("cuda:0"))
    manifest = publish(sender, 1)
    sender._buffers[0][3] ^= 1
    torch.cuda.synchronize()
    assert replicas[0].receive(manifest).startswith("embed came with checksums")


def test_a_rank_whose_memory_cannot_be_mapped_is_named(replicas: list[Replica]) -> None:
    sender = CudaIpcSender(0, 1, bucket_bytes=1024, device=torch.device("cuda:0"))
    manifest = publish(sender, 1)
    [memory] = manifest.locations
    wrong = (bytes(66), *memory.handles[0][1:])
    manifest = replace(manifest, locations=(replace(memory, handles=(wrong, *memory.handles[1:])),))
    expected = "weight_sync.transport=cuda_ipc: this replica's GPU cannot map the memory of trainer rank 0's"
    assert expected in replicas[0].receive(manifest)
