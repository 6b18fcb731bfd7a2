"""Samples of tensors: they show which tensors of two sets differ, for the price of a few elements of each."""

from collections.abc import Sequence

import torch

SAMPLE, RUN = 1024, 8
"""The largest number of elements of a tensor that are compared, and how many of them lie side by side: a line of the
cache has to be fetched for each run. After a step in bfloat16 with a learning rate of 1e-6 about 2% of all elements
differ: that none of 1,024 does has a chance of 1e-9."""


def sampled(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bytes of a few elements of each tensor, in host memory. A GPU is waited for once, not per tensor."""
    parts = [_spaced(tensor) for tensor in tensors]
    joined = torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.uint8)
    return list(joined.split([len(part) for part in parts]))


def differing(names: Sequence[str], some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[str]:
    """Return the names of the tensors whose samples differ."""
    pairs = zip(names, some, others, strict=True)
    return [name for name, one, other in pairs if not torch.equal(one, other)]


def shortened(names: Sequence[str], most: int = 8) -> str:
    """Return the names for a sentence: the first ones, and how many others there are."""
    others = len(names) - most
    return ", ".join(names[:most]) + (f" and {others} others" if others > 0 else "")


def _spaced(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of evenly spaced runs of elements. Their distance is odd, so that they come from all columns."""
    if tensor.dim() == 2 and not tensor.is_contiguous():
        tensor = tensor.t()  # as kernels want some weights: a copy of it lies in the same way
    flat = tensor.reshape(-1)  # without a copy where all elements lie in one piece
    if len(flat) > SAMPLE:
        num_runs = SAMPLE // RUN
        step = (len(flat) - RUN) // (num_runs - 1)
        flat = flat.as_strided((num_runs, RUN), (step - (step % 2 == 0), 1)).reshape(-1)
    return flat.contiguous().view(torch.uint8)
