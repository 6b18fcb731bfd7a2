"""Weights by NCCL, from a trainer on one GPU to a replica on another. Skipped with fewer than two."""

import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.fakes import make_order
from tests.support.transport_cases import assert_same, specs_of, weights
from weight_sync.transports.collective import CollectiveSender

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

RECEIVE = """
import pickle, sys, torch
from weight_sync.protocol import ReceivingWorker
from weight_sync.transports.collective import CollectiveReceiver
receiver, worker = CollectiveReceiver(), ReceivingWorker(replica="a", index=0, device="cuda:0")
for number, line in enumerate(sys.stdin):
    found = {}
    load = lambda tensors: found.update((name, tensor.cpu()) for name, tensor in tensors)
    receiver.receive(pickle.loads(bytes.fromhex(line)), worker, load)
    torch.save(found, f"{sys.argv[1]}/{number}")
    print("done", flush=True)
"""


def test_three_versions_arrive_bit_by_bit_and_who_does_not_come_is_named(tmp_path: Path) -> None:
    replica = subprocess.Popen(
        [sys.executable, "-c", RECEIVE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"},
    )
    assert replica.stdin is not None and replica.stdout is not None
    sender = CollectiveSender(0, 1, bucket_bytes=1024, device=torch.device("cuda:0"))

    def send(seed: int, timeout_s: float, present: bool) -> None:
        new = {name: tensor.cuda() for name, tensor in weights(seed).items()}
        order = replace(make_order(seed), receivers={"a": 1}, timeout_s=timeout_s)
        manifest = sender.publish(specs_of(new), lambda: iter(new.items()), order)
        if present:
            assert replica.stdin is not None
            replica.stdin.write(pickle.dumps(manifest).hex() + "\n")
            replica.stdin.flush()
        sender.send(lambda: iter(new.items()), manifest)

    for number, seed in enumerate((1, 2, 3)):
        send(seed, timeout_s=120.0, present=True)
        assert replica.stdout.readline() == "done\n"
        assert_same(torch.load(tmp_path / str(number)), weights(seed))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"a worker 0 \(last on .*\) did not come to \S+ within 2 s"):
        send(4, timeout_s=2.0, present=False)
    assert time.monotonic() - began < 10
    replica.communicate(timeout=60)
