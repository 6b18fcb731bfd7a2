"""The places where the host waits for the device: where a value is read, or copied there or back.

Fake tensors have no values. What a step reads of them is answered as for a step in which nothing is wrong: numbers are
0, conditions true, and every place is one where something is.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from configs.runtime.environment import REPO_ROOT
from scripts.plan.rehearsal.counting import tensors

OWN = Path(__file__).parent


def _zeros(tensor: Tensor) -> np.ndarray:
    dtype = torch.float32 if tensor.dtype is torch.bfloat16 else tensor.dtype
    return np.zeros(tuple(tensor.shape), str(dtype).removeprefix("torch."))


ANSWERS: Mapping[Any, Callable[..., Any]] = {
    Tensor.item: lambda tensor: tensor.dtype is torch.bool or 0 * _zeros(tensor).reshape(-1)[0].item(),
    Tensor.__bool__: lambda tensor: True,
    Tensor.__int__: lambda tensor: 0,
    Tensor.__float__: lambda tensor: 0.0,
    Tensor.tolist: lambda tensor: _zeros(tensor).tolist(),
    Tensor.nonzero: lambda tensor: torch.cartesian_prod(*map(torch.arange, tensor.shape)).view(-1, tensor.dim()),
    torch.equal: lambda one, other: True,
    torch.allclose: lambda one, other, *tolerances: True,
}
"""The answers to what reads values. Each makes the host wait."""
IS_CPU: Any = Tensor.is_cpu.__get__  # pyright: ignore
COPIES = (Tensor.cpu,)
"""The functions that copy a tensor to the host, which waits."""
TO_DEVICE = (torch.as_tensor, torch.tensor)
"""The functions that copy host memory that is not pinned to a device: the host waits until it is read."""


class HostReads(TorchFunctionMode):
    """Answers what reads values of fake tensors inside the `with` block, and counts it by its line.

    Example:
        with HostReads("cuda") as reads:
            worker.train_step(micro_batches, 0)
        reads.lines["trainer/worker/worker.py:215"]
    """

    def __init__(self, device: str) -> None:
        """`device`: "cpu" or "cuda": where the tensors are said to be, if the code asks."""
        super().__init__()
        self._is_on_cpu = device == "cpu"
        self.lines: Counter[str] = Counter()
        """The times that the host waits, by file and line of the code that makes it."""

    def __enter__(self) -> "HostReads":
        self._tolist = FakeTensor.tolist  # its own reads value by value, where a device sends them together
        FakeTensor.tolist = Tensor.tolist
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        FakeTensor.tolist = self._tolist

    def count_read(self) -> None:
        """Count that the code now reads a value."""
        self.lines[f"{caller()} reads a value"] += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors(args))
        if func in ANSWERS and is_fake:
            self.count_read()
            return ANSWERS[func](*args, **kwargs)
        if is_fake and func == IS_CPU and not self._is_on_cpu and _place(sys._getframe(1)):
            return False
        if is_fake and func is Tensor.data_ptr:
            return 0
        if func is Tensor.numpy and is_fake:  # it is on the host by then
            return _zeros(args[0])
        if func in COPIES and is_fake:
            self.lines[f"{caller()} copies to the host"] += 1
        elif func in TO_DEVICE and kwargs.get("device") is not None and not tensors(args):
            self.lines[f"{caller()} copies to the GPU"] += 1
        return func(*args, **kwargs)


def caller() -> str:
    """Return the innermost line of this project that is being executed, outside of the rehearsal."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (place := _place(frame)) is not None:
            return place
        frame = frame.f_back
    return "outside of the project"


def _place(frame: FrameType) -> str | None:
    """Return the file and line, of code of this project."""
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(REPO_ROOT) and OWN not in path.parents and ".venv" not in path.parts:
        return f"{path.relative_to(REPO_ROOT)}:{frame.f_lineno}"
    return None
