"""Attention by torch's flex_attention: any mask on a GPU, without one in memory.

The blocks of pairs that are computed come from the ends of subtrees, so that no pair outside of them is looked at.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from trainer.worker.attention.rows import Mask

BLOCK = 128
MOST_SHAPES = 256
"""Shapes of rows that it is compiled for. One more is an error: uncompiled, it would keep every pair in memory."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it, [N, H, L, D] -> [N, L, H, D], with soft caps and sinks."""
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if "block_mask" not in mask.made:
        mask.made["block_mask"] = block_mask(mask)
    if query.shape[1] // key.shape[1] & (query.shape[1] // key.shape[1] - 1):  # flex shares keys by powers of two only
        key, value = (heads.repeat_interleave(query.shape[1] // key.shape[1], 1) for heads in (key, value))
    attended = on(mask.device_type)(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped_at(softcap),
        block_mask=mask.made["block_mask"],
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:  # of the softmax, a share that goes nowhere: exp(sink) is added to its sum
        attended, aux = attended
        share = torch.sigmoid(aux.lse - sinks.view(1, -1, 1).to(aux.lse.dtype))
        attended = attended * share[..., None].to(attended.dtype)
    return attended.transpose(1, 2).contiguous(), None


def _capped_at(softcap: float) -> Any:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def on(device: str) -> Any:
    """Compiled once per shape; on CPUs, where it has no gradients, not at all."""
    if device == "cpu":
        return flex_attention
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_SHAPES)
    # That is of this thread only, and layers that are computed again run in one of autograd's. Torch 2.11 has no
    # argument.
    is_argument = "recompile_limit" in inspect.signature(torch.compile).parameters
    limit: dict[str, Any] = {"recompile_limit": MOST_SHAPES} if is_argument else {}
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, **limit)


def block_mask(mask: Mask) -> BlockMask:
    """Return which blocks of BLOCK queries and keys are computed, and which of them without looking at each pair."""
    rows = mask.rows
    num_rows, length = rows.input_ids.shape
    ends, positions = rows.ends, rows.positions
    num_blocks = -(-length // BLOCK)

    def split_blocks(values: Tensor, fill: int) -> Tensor:
        return nn.functional.pad(values, (0, num_blocks * BLOCK - length), value=fill).view(num_rows, -1, BLOCK)

    first = torch.arange(num_blocks, device=ends.device) * BLOCK
    begins, furthest = first[:, None], split_blocks(ends, -1).amax(-1)[:, None]  # of queries, of keys
    computed = (first <= begins) & (furthest >= begins)  # [N, queries, keys]: a key's subtree ends among the queries
    nearest = split_blocks(ends, length).amin(-1)[:, None]
    is_full = (first < begins) & (nearest >= (begins + BLOCK).clamp(max=length) - 1) & (begins + BLOCK <= length)
    if not mask.is_causal:
        assert mask.reach is not None
        oldest = split_blocks(positions, mask.rows.most_positions).amin(-1)[:, :, None]
        newest = split_blocks(positions, -1).amax(-1)[:, None]
        computed &= oldest - newest < mask.reach
        is_full = torch.zeros_like(is_full)
    partial_blocks, full = computed & ~is_full, computed & is_full
    return BlockMask.from_kv_blocks(
        *_list_blocks(partial_blocks),
        *_list_blocks(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_pairs(mask),
        seq_lengths=(length, length),
    )


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row has, int32 [N, 1, queries], and which ones come first, of bool [N, queries,
    keys]."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()


def _pairs(mask: Mask) -> Any:
    ends, positions, function = mask.rows.ends, mask.rows.positions, mask.function
    if mask.is_causal:

        def in_tree(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query <= ends[batch, key])

        return in_tree

    def in_both(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = function(batch, head, positions[batch, query], positions[batch, key])
        return (key <= query) & (query <= ends[batch, key]) & allowed

    return in_both
