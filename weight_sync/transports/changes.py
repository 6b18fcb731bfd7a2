"""What changed between two versions of a tensor, bit by bit.

Between optimizer steps of RL most weights in bfloat16 are the same to the last bit: the step is smaller than half the
distance to the format's next value.
"""

import torch

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size in bytes. As integers, NaN equals itself and 0.0 is not -0.0."""
WORD = torch.int64
INT32_MAX = 2**31 - 1


def changed(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Flat positions, ascending, of the elements of which any bit differs. int32 where that is enough, else int64.

    Both contiguous. Compared in words of 8 bytes first, which is four times as fast as by the element in bfloat16.
    """
    before, after = _bits(old), _bits(new)
    per_word = WORD.itemsize // after.element_size()
    whole = len(after) // per_word * per_word
    differing = _words(before[:whole]) ^ _words(after[:whole])
    words = torch.nonzero(differing).view(-1)
    within = torch.nonzero(differing[words].view(after.dtype)).view(-1)
    positions = words[within // per_word] * per_word + within % per_word
    rest = torch.nonzero(before[whole:] != after[whole:]).view(-1) + whole
    return torch.cat([positions, rest]).to(torch.int32 if len(after) <= INT32_MAX else torch.int64)


def take(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The elements at flat positions of a contiguous tensor."""
    return tensor.view(-1)[positions.long()]


def put(tensor: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Over the elements at flat positions of a contiguous tensor, in place."""
    _bits(tensor)[positions.long()] = _bits(values)


def is_worth_it(positions: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether positions and values are fewer bytes than the whole tensor."""
    return len(positions) * (positions.element_size() + tensor.element_size()) < tensor.nbytes


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(BITS[tensor.element_size()])


def _words(bits: torch.Tensor) -> torch.Tensor:
    aligned = bits.storage_offset() * bits.element_size() % WORD.itemsize == 0
    return (bits if aligned else bits.clone()).view(WORD)
