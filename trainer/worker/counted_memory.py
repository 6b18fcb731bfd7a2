"""The memory that a computation takes, counted: the bytes of the tensors that are alive at the same time."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Counts the tensors that are made inside the `with` block, on any device. On `meta`, nothing is allocated.

    Example:
        with Memory() as memory:
            loss(model).backward()
        memory.peak
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        """The bytes of the largest tensor."""
        self.peak = 0
        """The largest number of bytes alive at once. Tensors that were there before do not count."""
        self._bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, counts=False)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._meet(tensor, counts=True)
        return result

    def _meet(self, tensor: torch.Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()  # views share one, and count once
        if storage._cdata in self._known:
            return
        size = storage.nbytes() if counts else 0
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._forget, storage._cdata, size)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        self.largest = max(self.largest, size)

    def _forget(self, address: int, size: int) -> None:
        self._known.remove(address)
        self._bytes -= size


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
