"""A digest of trained weights: any changed bit gives another, however many ranks hold them."""

import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from trainer.worker.loading import local, local_rows

_ODD = -7046029254386353131
"""2^64 divided by the golden ratio, as a signed number: its multiples are spread evenly (Knuth, volume 3, 6.4)."""


def trained_rows(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (name, this rank's rows, place of the first one) of each parameter that is trained. Its name begins with
    that of its module: `policy/causal_lm.model.norm.weight`."""
    for kind, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                yield f"{kind}/{name}", local(parameter), local_rows(parameter).start if parameter.dim() else 0


class WeightsDigest:
    """Digests what one worker trains, whose parameters keep their names and sizes.

    What the sums are multiplied by is kept: to make it again for every digest would start most of the kernels, and on a
    GPU that takes longer than the sums of a small model.
    """

    def __init__(self) -> None:
        self._multipliers: Tensor | None = None

    def part(self, rows_by_name: Iterable[tuple[str, Tensor, int]]) -> Tensor:
        """Return this rank's part of the digest: a 64-bit number, on the parameters' device. The sum of all ranks'
        parts, modulo 2^64, is the digest of the whole.

        A parameter is taken as words in rows of its first dimension. Its part is the sum of its rows' sums, each times
        an odd number that belongs to its name and place, and of its columns' sums, each times another. So a word that
        changes always changes the digest, and the order of the parameters does not.
        """
        sums: list[Tensor] = []
        multipliers: list[Tensor] = []
        for name, values, first_row in rows_by_name:
            if not values.numel():
                continue
            rows, columns = _sums(_words(values.contiguous()))
            sums += [rows, columns]
            if self._multipliers is None:
                seed = zlib.crc32(name.encode())
                # Twice an odd number: a word is counted odd times in all, so no change of it is lost modulo 2^64.
                multipliers += [_multipliers(seed, first_row, rows), _multipliers(~seed, 0, columns) * 2]
        if not sums:
            return torch.zeros((), dtype=torch.int64)
        if self._multipliers is None:
            self._multipliers = torch.cat(multipliers)
        return (torch.cat(sums) * self._multipliers).sum()


def unsigned(digest: int) -> str:
    """Return a 64-bit digest as 16 hexadecimal digits."""
    return f"{digest & (2**64 - 1):016x}"


def _words(values: Tensor) -> Tensor:
    """Return the values [N, ...] as integers [N, M], of 8 bytes where a row is a whole number of them."""
    rows = values.reshape(len(values) if values.dim() else 1, -1)
    if rows.shape[1] * rows.element_size() % 8 == 0:
        unaligned = rows.data_ptr() % 8 or rows.storage_offset() % 8  # torch cannot view it as words
        return (rows.clone() if unaligned else rows).view(torch.int64)
    return rows.view(torch.int32 if rows.element_size() == 4 else torch.int16)


def _sums(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of rows and of columns. On a CPU numpy takes half of torch's time for them."""
    if words.is_cpu:
        values = words.numpy()
        return torch.from_numpy(values.sum(1, dtype="int64")), torch.from_numpy(values.sum(0, dtype="int64"))
    return words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)


def _multipliers(seed: int, first: int, sums: Tensor) -> Tensor:
    """Return an odd number for each place, [N]. The same bits at two places have different products."""
    places = torch.arange(first, first + len(sums), dtype=torch.int64, device=sums.device)
    mixed = (places * 2 + 1) * _ODD + seed * 2
    return (mixed ^ (mixed >> 29)) * _ODD | 1
