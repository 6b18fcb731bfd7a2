"""Weights through memory of one GPU, mapped by another process. Skipped without a GPU."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.transport_cases import assert_same, weights
from weight_sync.transports.cuda_ipc import CudaIpcSender

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RECEIVE = """
import json, sys, torch
from weight_sync.transports.cuda_ipc import CudaIpcReceiver
receiver = CudaIpcReceiver()
for number, line in enumerate(sys.stdin):
    try:
        found = {name: tensor.cpu() for name, tensor in receiver.tensors(json.loads(line))}
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

    def receive(self, manifest: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({**manifest, "replica": "a", "worker": 0, "device": "cuda:0"}) + "\n")
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


def publish(sender: CudaIpcSender, seed: int) -> dict[str, Any]:
    new = {name: tensor.cuda() for name, tensor in weights(seed).items()}
    specs = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in new.items()]
    order = {"global_steps": seed, "nonce": f"{seed:08x}", "receivers": {"a": 1}, "base": None, "timeout_s": 60.0}
    manifest = sender.publish(specs, lambda: iter(new.items()), order)
    return manifest | {"locations": [manifest["location"]], "checksums": [manifest["checksums"]]}


def test_three_versions_arrive_bit_by_bit_at_two_replicas(replicas: list[Replica]) -> None:
    sender = CudaIpcSender(0, 1, bucket_bytes=1024, device=torch.device("cuda:0"))
    for seed in (1, 2, 3):
        manifest = publish(sender, seed)
        assert len(manifest["locations"][0]["handles"]) > 3
        for replica in replicas:
            assert_same(replica.receive(manifest), weights(seed))
    sender.close()


def test_a_byte_that_changed_names_its_tensor(replicas: list[Replica]) -> None:
    sender = CudaIpcSender(0, 1, bucket_bytes=1024, device=torch.device("cuda:0"))
    manifest = publish(sender, 1)
    sender._buffers[0][3] ^= 1
    torch.cuda.synchronize()
    assert replicas[0].receive(manifest).startswith("embed came with checksums")
    sender.close()


def test_a_rank_whose_memory_cannot_be_mapped_is_named(replicas: list[Replica]) -> None:
    sender = CudaIpcSender(0, 1, bucket_bytes=1024, device=torch.device("cuda:0"))
    manifest = publish(sender, 1)
    manifest["locations"][0]["handles"][0][0] = base64.b64encode(bytes(66)).decode()
    expected = "weight_sync.transport=cuda_ipc: this replica's GPU cannot map the memory of trainer rank 0's"
    assert expected in replicas[0].receive(manifest)
    sender.close()
