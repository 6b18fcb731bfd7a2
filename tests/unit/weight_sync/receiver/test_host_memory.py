"""Memory for copies of weights: laid out as they are, apart from each other, and in few pieces."""

import pytest
import torch

from weight_sync.receiver import host_memory
from weight_sync.receiver.host_memory import HostMemory


def test_copies_have_the_layout_of_their_originals_and_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [
        torch.randn(7, 5),
        torch.randn(40, 9).t(),
        torch.randn(()).bfloat16(),
        torch.randint(0, 9, (3,)).bool(),
        torch.empty(0, 4),
        torch.randn(2000),
        torch.randn(3, 5, 2).permute(2, 0, 1),
    ]
    pieces, empty = list[int](), torch.empty
    monkeypatch.setattr(host_memory, "PIECE", 4096)
    monkeypatch.setattr(torch, "empty", lambda size, **more: (pieces.append(size), empty(size, **more))[1])
    memory = HostMemory(sum(tensor.nbytes for tensor in tensors), pin=False)
    copies = [memory.empty_like(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride() and copy.dtype == tensor.dtype
        assert copy.data_ptr() % 16 == 0
    assert pieces == [0, 4096, 8000, 128]
