"""Attention by SDPA over masks in tensors, in blocks of queries: what the others are tested against, and for CPUs.

Most pairs of rows with many trees, or of a large tree, are in different branches. So each block of queries attends to
the ancestors of its tokens only: about as many pairs as the sequences have alone, less those that they share. No mask
is ever as large as all pairs of a long row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.worker.attention.rows import Mask, Rows

SMALLEST_BLOCK, MOST_BLOCKS = 128, 32
MOST_KEPT = 2**26
"""Pairs of a kind of layers whose masks are kept from layer to layer. More are made in each layer, and again in its
backward pass, one block at a time."""


class Block(NamedTuple):
    """Consecutive queries of the rows, and the keys that any of them may attend to."""

    queries: slice
    keys: Tensor  # [K] places in the row
    mask: Tensor | None  # bool [N, 1, Q, K]; None: to be made


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it, [N, H, L, D] -> [N, L, H, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as whole  # takes seconds to import

    if mask.rows.last is None and mask.is_causal:
        return whole(module, query, key, value, None, **options)

    def attend_block(block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        allowed = mask.allowed(block.queries, block.keys) if block.mask is None else block.mask
        queries, keys, values = query[:, :, block.queries], key[:, :, block.keys], value[:, :, block.keys]
        return whole(module, queries, keys, values, allowed, **options)[0]

    parts = []
    for block in blocks(mask):
        if block.mask is not None:
            parts.append(attend_block(block, query, key, value))
        else:  # a mask that is too large to keep is made again in the backward pass
            parts.append(checkpoint(attend_block, block, query, key, value, use_reentrant=False))
    return torch.cat(parts, dim=1), None


def blocks(mask: Mask) -> list[Block]:
    """Return the blocks of the mask, which are made once for all layers of a kind."""
    if "blocks" not in mask.made:
        pairs = key_blocks(mask.rows, None if mask.is_causal else mask.reach)
        is_kept = len(mask.rows.ends) * sum((q.stop - q.start) * len(keys) for q, keys in pairs) <= MOST_KEPT
        mask.made["blocks"] = [Block(q, keys, mask.allowed(q, keys) if is_kept else None) for q, keys in pairs]
    return mask.made["blocks"]


def key_blocks(rows: Rows, reach: int | None) -> list[tuple[slice, Tensor]]:
    """Return (queries, keys) of each block. Keys are the queries and, of what comes before, their ancestors within
    reach."""
    pairs = []
    for queries in cuts(rows):
        needed = rows.ends[:, : queries.stop] >= queries.start
        if reach is not None:
            first = rows.positions[:, queries].min(1, keepdim=True).values
            needed &= rows.positions[:, : queries.stop] > first - reach
        pairs.append((queries, needed.any(0).nonzero()[:, 0]))
    return pairs


def cuts(rows: Rows) -> list[slice]:
    """Return the queries of each block. A row by itself is cut between trees where it can be."""
    num_rows, length = rows.input_ids.shape
    size = max(SMALLEST_BLOCK, -(-length // MOST_BLOCKS))
    starts = [0]
    for begin, tree in (
        zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True) if num_rows == 1 else [(0, length)]
    ):
        if begin + tree - starts[-1] > size:
            starts += [begin] if begin > starts[-1] else []
            pieces = -(-tree // size)
            starts += [begin + tree * piece // pieces for piece in range(1, pieces)]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], length], strict=True)]
