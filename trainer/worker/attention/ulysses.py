"""Ulysses sequence parallelism (arXiv:2309.14509): each rank has a part of every row, and in attention a part of the
heads for whole rows.

So attention sees every pair of tokens, and any mask works. Everything else is computed per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.batch import Int64Array
from trainer.worker.expert_parallel import exchanged


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share rows, and this rank among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def part(self, length: int) -> slice:
        """Return this rank's part of rows of `length` tokens, a multiple of `size`."""
        own = length // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def attend(
        self,
        attend: Callable[..., tuple[Tensor, None]],
        module: nn.Module,
        heads: tuple[Tensor, Tensor, Tensor],
        mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention of a part of the rows: query, key, value [N, H, L / k, D] -> [N, L / k, H, D].

        Keys and values of fewer heads than ranks are replicated.

        Args:
            attend: computes whole rows and some of the heads.
        """
        query, key, value = heads
        num_heads, num_shared = query.shape[1], lcm(key.shape[1], self.size)
        key, value = (heads.repeat_interleave(num_shared // key.shape[1], 1) for heads in (key, value))
        query, key, value = self._whole_rows([query, key, value])
        per_key = SimpleNamespace(num_key_value_groups=num_heads // num_shared, is_causal=True)
        if options.get("s_aux") is not None:  # one per head
            options["s_aux"] = options["s_aux"].chunk(self.size)[self.rank]
        attended, _ = attend(per_key, query, key, value, mask, **options)
        return self._whole_heads(attended), None

    def _whole_rows(self, parts: list[Tensor]) -> list[Tensor]:
        """[N, H, L / k, D] each -> [N, H / k, L, D] each, in one exchange."""
        num_rows, _, length, _ = parts[0].shape
        strings = [part.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(1) for part in parts]
        received = self._exchanged(torch.cat(strings, 1)).split([string.shape[1] for string in strings], 1)
        return [
            string.view(self.size, num_rows, -1, length, part.shape[-1]).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for string, part in zip(received, parts, strict=True)
        ]

    def _whole_heads(self, attended: Tensor) -> Tensor:
        """[N, L, H / k, D] -> [N, L / k, H, D]."""
        by_rank = attended.unflatten(1, (self.size, -1)).transpose(0, 1)  # [k, N, L / k, H / k, D]
        return self._exchanged(by_rank).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchanged(self, parts: Tensor) -> Tensor:
        """[k, ...], a part for each rank -> a part from each rank."""
        return exchanged(parts, [1] * self.size, [1] * self.size, self.group)

    def gathered(self, values: Tensor, owners: Int64Array) -> Tensor:
        """[C, T of this rank] -> [C, T] of all ranks, in the order of `owners` [T].

        Every rank goes on to compute the same with them, so each one's gradient is that of its own values.
        """
        return _Gather.apply(values, owners, self)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, owners: Int64Array, among: SequenceGroup) -> Tensor:
        counts = np.bincount(owners, minlength=among.size)
        ctx.own = torch.as_tensor(np.flatnonzero(owners == among.rank), device=values.device)
        longest = int(counts.max())
        padded = nn.functional.pad(values, (0, longest - values.shape[1])).contiguous()
        parts = padded.new_empty(among.size * len(padded), longest)
        dist.all_gather_into_tensor(parts, padded, group=among.group)
        order = np.argsort(np.argsort(owners, kind="stable"), kind="stable")
        gathered = torch.cat(
            [part[:, :count] for part, count in zip(parts.chunk(among.size), counts.tolist(), strict=True)], 1
        )
        return gathered[:, torch.as_tensor(order, device=values.device)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][:, ctx.own], None, None
