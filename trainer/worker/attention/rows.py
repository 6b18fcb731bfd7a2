"""The rows of a micro-batch on the device, and which of their tokens attend to which."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.batch import MicroBatch

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query's position, key's position) -> whether the query attends to the key, elementwise."""

Attend = Callable[..., tuple[Tensor, None]]
"""(module, query, key, value, mask, **options) -> ([N, L, H, D], None)."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Token i of a row may attend to token j iff j <= i <= last[j]: rows are prefix trees, end to end.

    A sequence by itself is a tree without branches: a chain.
    """

    input_ids: Tensor  # [N, L]
    positions: Tensor  # [N, L]
    last: Tensor | None  # [N, L]; None: each row is one chain, with its padding
    starts: NDArray[np.int64]
    """The place where each tree begins, in all rows as one string of N * L tokens. Ascending."""
    are_chains: bool
    """True if no tree branches."""
    most_positions: int
    """The number of positions: the largest plus one."""

    @classmethod
    def of(cls, batch: MicroBatch, length: int, device: torch.device) -> "Rows":
        """Lay out the batch with `length` tokens a row; what is added is one chain of padding in each row."""
        num_rows, before = batch.input_ids.shape
        added = ((0, 0), (0, length - before))
        positions, last = np.pad(batch.position_ids, added), batch.last
        starts, are_chains = np.arange(num_rows) * length, True
        if last is not None:
            last = np.pad(last, added, constant_values=length - 1)
            reached = np.maximum.accumulate(last, axis=1)
            begins = np.ones(last.shape, np.bool_)
            begins[:, 1:] = reached[:, :-1] < np.arange(1, length)
            starts, are_chains = np.flatnonzero(begins), bool((last == reached).all())
        return cls(
            input_ids=torch.as_tensor(np.pad(batch.input_ids, added), device=device),
            positions=torch.as_tensor(positions, device=device),
            last=None if last is None else torch.as_tensor(last, device=device),
            starts=starts,
            are_chains=are_chains,
            most_positions=int(positions.max(initial=0)) + 1,
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each tree."""
        return np.diff(self.starts, append=self.input_ids.numel())

    @cached_property
    def ends(self) -> Tensor:
        """[N, L]: `last`, of chains too."""
        if self.last is not None:
            return self.last
        return torch.full_like(self.input_ids, self.input_ids.shape[1] - 1)


class Mask:
    """The keys that the queries of a kind of layers attend to. It passes through the model in place of a mask in a
    tensor.

    It holds what is made of it, for all layers of the kind and for those that are recomputed in the backward pass. It
    is no dataclass: FSDP takes those apart to cast what is in them, and gives each layer a copy that holds nothing yet.
    """

    def __init__(
        self,
        rows: Rows,
        function: MaskFunction,
        reach: int | None,
        attend: Attend,
        device_type: str = "cpu",
    ):
        """
        Args:
            function: the model's own, of positions: causal, sliding window, chunks.
            reach: no query attends to keys so many positions before it. None: they reach all of them.
            attend: (module, query, key, value, mask, **options) -> ([N, L, H, D], None).
            device_type: the kind of device whose kernels compute it.
        """
        self.rows = rows
        self.function = function
        self.reach = reach
        self.attend = attend
        self.device_type = device_type
        self.made: dict[str, Any] = {}

    @property
    def is_causal(self) -> bool:
        """True if a query attends to all that comes before it in its sequence."""
        return self.reach is None or self.reach >= self.rows.most_positions

    def allowed(self, queries: slice, keys: Tensor) -> Tensor:
        """Return for places of queries and keys [K] in the rows, bool [N, 1, Q, K], whether they attend."""
        rows = self.rows
        query, key = torch.arange(rows.ends.shape[1], device=keys.device)[queries][:, None], keys[None, :]
        tree = (key <= query) & (query <= rows.ends[:, None, keys])
        if self.is_causal:
            return tree[:, None]
        batch = torch.arange(len(rows.ends), device=keys.device)[:, None, None]
        positions = rows.positions[:, queries, None], rows.positions[:, None, keys]
        return (tree & self.function(batch, torch.zeros_like(batch), *positions))[:, None]
