"""Attention within rows that hold a prefix tree of sequences.

A model builds its own masks, of every kind that its layers need, from functions of a query's and a key's position:
causal, sliding window, chunked. Here they are evaluated at the tokens' positions in their sequences instead of their
places in the row, and cut down to a token's ancestors in the tree. So each sequence attends as it would alone.

Most pairs of a large tree are in different branches. So attention is computed in blocks of queries, each over the
ancestors of its tokens only: about as many pairs as the sequences have alone, less those that they share.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query's position, key's position) -> whether the query attends to the key, elementwise."""
FLOAT, BOOL = "eager", "sdpa"
"""The implementations of attention that take the mask as a tensor, by their names in transformers."""


SMALLEST_BLOCK, MOST_BLOCKS = 128, 32


class Block(NamedTuple):
    """Consecutive queries of a row, and the keys that any of them may attend to."""

    queries: slice
    keys: Tensor  # [K] places in the row
    mask: Tensor  # bool [N, 1, queries, K]


BLOCKS: Any = WeakTensorKeyDictionary()
"""Mask [N, 1, L, L] -> its blocks. They belong to the mask and not to the forward, because recomputed layers attend
again in the backward pass."""


def tree_mask(last: Tensor) -> Tensor:
    """[N, L] -> bool [N, 1, L, L]: token i may attend to token j iff j <= i <= last[j].

    Args:
        last: where each token's subtree ends (`MicroBatch.last`). Padding ends at itself, and so attends to itself,
            which keeps its softmax finite.
    """
    places = torch.arange(last.shape[1], device=last.device)
    query, key = places[:, None], places[None, :]
    return ((key <= query) & (query <= last[:, None, :]))[:, None]


def key_blocks(last: Tensor) -> list[tuple[slice, Tensor]]:
    """[N, L] -> (queries, keys) of each block: keys are the queries and, of what comes before, their ancestors."""
    length = last.shape[1]
    size = max(SMALLEST_BLOCK, -(-length // MOST_BLOCKS))
    starts = range(0, length, size)
    return [(slice(i, i + size), (last[:, : i + size] >= i).any(0).nonzero()[:, 0]) for i in starts]


def block_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Attention by SDPA as transformers calls it, block by block where the mask is a tree's. Returns [N, L, H, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as whole

    blocks = None if attention_mask is None else BLOCKS.get(attention_mask)
    if blocks is None:
        return whole(module, query, key, value, attention_mask, **given)
    parts = [whole(module, query[:, :, q], key[:, :, k], value[:, :, k], mask, **given)[0] for q, k, mask in blocks]
    return torch.cat(parts, dim=1), None


@contextmanager
def tree_masks(last: Tensor, position_ids: Tensor) -> Iterator[None]:
    """Let models build their masks for rows with these subtrees [N, L] and positions [N, L] inside the `with` block.

    A model that does not build its masks by transformers' `masking_utils` is not reached: its branches see each other.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as BUILDERS  # takes seconds to import
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTION

    ATTENTION[BOOL] = block_attention  # for good, because of layers that are recomputed; other masks do not notice
    tree, blocks = tree_mask(last), key_blocks(last)
    batch = torch.arange(len(last), device=last.device)[:, None, None, None]
    query, key = position_ids[:, None, :, None], position_ids[:, None, None, :]

    def bool_mask(*, mask_function: MaskFunction, use_vmap: bool = False, **given: Any) -> Tensor:
        if use_vmap:
            raise NotImplementedError("its attention masks depend on more than the positions of two tokens")
        return tree & mask_function(batch, torch.zeros_like(batch), query, key)

    def blocked_mask(**given: Any) -> Tensor:
        mask = bool_mask(**given)
        BLOCKS[mask] = [Block(queries, keys, mask[:, :, queries][..., keys]) for queries, keys in blocks]
        return mask

    def float_mask(*, dtype: torch.dtype, **given: Any) -> Tensor:
        allowed = bool_mask(**given)
        return torch.zeros((), dtype=dtype, device=tree.device).where(allowed, torch.finfo(dtype).min)

    BUILDERS[BOOL], BUILDERS[FLOAT] = blocked_mask, float_mask
    try:
        yield
    finally:
        del BUILDERS[BOOL], BUILDERS[FLOAT]
