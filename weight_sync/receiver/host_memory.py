"""Host memory for copies of weights: pinned for GPUs, and taken in large pieces.

torch rounds every piece of pinned memory up to a power of two, which for each tensor by itself would come to almost
twice the weights: 28.7 GB for the 15.2 GB of Qwen2.5-7B.
"""

import torch
from torch import Tensor

PIECE = 2**31
ALIGNMENT = 64


class HostMemory:
    """Hands out memory for tensors that are freed together.

    Example:
        memory = HostMemory(sum(tensor.nbytes for tensor in tensors), pin=True)
        copies = [memory.empty_like(tensor).copy_(tensor) for tensor in tensors]
    """

    def __init__(self, num_bytes: int, *, pin: bool):
        """`num_bytes`: of all tensors together, about."""
        self._pin = pin
        self._to_come = num_bytes
        self._room = torch.empty(0, dtype=torch.uint8)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return memory for a copy of a tensor, laid out as it is."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._room):
            piece = max(size, min(PIECE, self._to_come))
            self._room = torch.empty(piece, dtype=torch.uint8, pin_memory=self._pin)
        place, self._room = self._room[: tensor.nbytes], self._room[size:]
        self._to_come -= tensor.nbytes
        strides = torch.empty_like(tensor, device="meta").stride()
        return place.view(tensor.dtype).as_strided(tensor.shape, strides)
