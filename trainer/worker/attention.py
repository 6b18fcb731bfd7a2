"""Attention within rows that hold a prefix tree of sequences.

A model builds its own masks, of every kind that its layers need, from functions of a query's and a key's position:
causal, sliding window, chunked. Here they are evaluated at the tokens' positions in their sequences instead of their
places in the row, and cut down to a token's ancestors in the tree. So each sequence attends as it would alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query's position, key's position) -> whether the query attends to the key, elementwise."""
FLOAT, BOOL = "eager", "sdpa"
"""The implementations of attention that take the mask as a tensor, by their names in transformers."""


def tree_mask(last: Tensor) -> Tensor:
    """[N, L] -> bool [N, 1, L, L]: token i may attend to token j iff j <= i <= last[j].

    Args:
        last: where each token's subtree ends (`MicroBatch.last`). Padding ends at itself, and so attends to itself,
            which keeps its softmax finite.
    """
    places = torch.arange(last.shape[1], device=last.device)
    query, key = places[:, None], places[None, :]
    return ((key <= query) & (query <= last[:, None, :]))[:, None]


@contextmanager
def tree_masks(last: Tensor, position_ids: Tensor) -> Iterator[None]:
    """Let models build their masks for rows with these subtrees [N, L] and positions [N, L] inside the `with` block.

    A model that does not build its masks by transformers' `masking_utils` is not reached: its branches see each other.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as BUILDERS  # takes seconds to import

    tree = tree_mask(last)
    batch = torch.arange(len(last), device=last.device)[:, None, None, None]
    query, key = position_ids[:, None, :, None], position_ids[:, None, None, :]

    def bool_mask(*, mask_function: MaskFunction, use_vmap: bool = False, **given: Any) -> Tensor:
        if use_vmap:
            raise NotImplementedError("its attention masks depend on more than the positions of two tokens")
        return tree & mask_function(batch, torch.zeros_like(batch), query, key)

    def float_mask(*, dtype: torch.dtype, **given: Any) -> Tensor:
        allowed = bool_mask(**given)
        return torch.zeros((), dtype=dtype, device=tree.device).where(allowed, torch.finfo(dtype).min)

    BUILDERS[BOOL], BUILDERS[FLOAT] = bool_mask, float_mask
    try:
        yield
    finally:
        del BUILDERS[BOOL], BUILDERS[FLOAT]
