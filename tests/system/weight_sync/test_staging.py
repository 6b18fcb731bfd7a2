"""One version after another into the same shadow, in the threads of a worker."""

import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.fakes import make_manifest, make_tag
from weight_sync.protocol import Checksums, Load, Manifest, Receiver, ReceivingWorker
from weight_sync.receiver.merge import Merger
from weight_sync.receiver.vllm_receiver import Staging
from weight_sync.transports import registry


class NoTensors(Receiver):
    """A receiver that has come to the end at once."""

    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        load(iter(()))
        assert manifest.checksums is not None
        return manifest.checksums


class SlowShadow:
    """Each load lasts until it is let go."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.may_end = [threading.Event(), threading.Event()]

    def load(self, tensors: Any, num_tensors: int) -> None:
        number = len(self.events) // 2
        self.events.append(f"begin {number}")
        assert self.may_end[number].wait(60)
        self.events.append(f"end {number}")
        if number == 0:
            raise OSError("the trainer stopped sending")


def staging(version: int, shadow: Any, before: Staging | None) -> Staging:
    manifest = replace(make_manifest(version), transport="no tensors")
    worker = ReceivingWorker(replica="a", index=0, device="cpu")
    taking = partial(Merger().merging, device=torch.device("cpu"), load=shadow.load)
    return Staging(manifest, worker, taking, shadow, None, before)


def test_a_version_waits_for_one_that_was_given_up_and_has_not_heard_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer was stopped because another replica failed, and is tried again at once."""
    monkeypatch.setitem(registry._receivers, "no tensors", NoTensors())
    shadow: Any = SlowShadow()
    first = staging(1, shadow, None)
    second = staging(2, shadow, first)
    deadline = time.monotonic() + 60
    while not shadow.events and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.result() is None and second.result() is None and shadow.events == ["begin 0"]
    shadow.may_end[1].set()
    assert second.result() is None
    shadow.may_end[0].set()
    wait([second.checksum], 60)
    assert shadow.events == ["begin 0", "end 0", "begin 1", "end 1"]
    assert second.result() == make_tag(2).checksum
    assert not torch.is_inference_mode_enabled()
