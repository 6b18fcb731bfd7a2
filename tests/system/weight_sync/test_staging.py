"""One version after another into the same shadow, in the threads of a worker."""

import threading
import time
from typing import Any

import torch

from weight_sync.protocol import combine
from weight_sync.receiver.vllm_receiver import Staging


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


def manifest(checksum: int) -> dict[str, Any]:
    return {"transport": "collective", "tensors": [], "checksums": [[checksum]]}


def test_a_version_waits_for_one_that_was_given_up_and_has_not_heard_of_it() -> None:
    """As when a transfer is stopped because another replica failed, and tried again at once."""
    shadow: Any = SlowShadow()
    first = Staging(manifest(1), shadow, None, None)
    second = Staging(manifest(2), shadow, None, first)
    deadline = time.monotonic() + 60
    while not shadow.events and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.result() is None and second.result() is None and shadow.events == ["begin 0"]
    shadow.may_end[1].set()
    assert second.result() is None
    shadow.may_end[0].set()
    second.thread.join(60)
    assert shadow.events == ["begin 0", "end 0", "begin 1", "end 1"]
    assert second.result() == combine([[2]])
    assert not torch.is_inference_mode_enabled()
