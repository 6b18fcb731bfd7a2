"""Attention of chains end to end, without masks: flash attention over sequences of any lengths, on CPUs by a loop."""

from inspect import signature
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from trainer.worker.attention import dense
from trainer.worker.attention.rows import Mask

LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
"""The limits of flash attention: the widest head, and what its width is a multiple of."""
FEWER_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""The argument by which keys may have fewer heads than queries. Flash attention takes them, and torch 2.11 hands them
on without being told."""
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments that torch's flash attention does not have."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it, [N, H, L, D] -> [N, L, H, D].

    Raises:
        ValueError: varlen cannot compute it.
    """
    if (reason := refusal(query, value, mask, options)) is not None:
        raise ValueError(f"trainer.attention=varlen: {reason}")
    if mask.device_type == "cpu":
        return _by_loop(module, query, key, value, mask, **options)
    bounds, longest, window = segments(mask)
    attended = varlen_attn(
        _as_string(query),
        _as_string(key),
        _as_string(value),
        bounds,
        bounds,
        longest,
        longest,
        scale=options.get("scaling"),
        window_size=(window, 0),
        **FEWER_KEYS,
    )
    assert isinstance(attended, Tensor)
    return attended.view(len(query), -1, *attended.shape[1:]), None


def refusal(query: Tensor, value: Tensor, mask: Mask, options: dict[str, Any]) -> str | None:
    """Return why these rows or this module cannot be computed here, or None."""
    if not mask.rows.are_chains:
        return "rows have branches"
    if unknown := [name for name in UNKNOWN if options.get(name) is not None]:
        return f"flash attention knows no {unknown[0]}"
    if mask.device_type == "cpu":
        return None
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention computes in bfloat16, not in {query.dtype}"
    width, value_width = query.shape[-1], value.shape[-1]
    if width != value_width or width > LARGEST_HEAD or width % HEAD_MULTIPLE:
        return f"flash attention has no heads of width {width} and {value_width}"
    return None


def segments(mask: Mask) -> tuple[Tensor, int, int]:
    """(bounds int32 [S + 1] in the rows as one string, longest segment, how far back queries reach or -1).

    Chunks are segments of their own: nothing attends to another.
    """
    if "segments" not in mask.made:
        bounds, window = np.append(mask.rows.starts, mask.rows.input_ids.numel()), -1
        if not mask.is_causal:
            assert mask.reach is not None
            if has_chunks(mask, mask.reach):
                begins = (mask.rows.positions.flatten() % mask.reach == 0).nonzero()[:, 0].cpu().numpy()
                bounds = np.append(begins, mask.rows.input_ids.numel())
            else:
                window = mask.reach - 1
        on_device = torch.as_tensor(bounds.astype(np.int32), device=mask.rows.input_ids.device)
        mask.made["segments"] = on_device, int(np.diff(bounds).max()), window
    return mask.made["segments"]


def has_chunks(mask: Mask, reach: int) -> bool:
    """Return whether queries attend within chunks of `reach` positions, instead of to the last `reach` positions.

    Raises:
        ValueError: they do neither.
    """
    queries = torch.arange(reach, mask.rows.most_positions, device=mask.rows.input_ids.device)
    batch = torch.zeros_like(queries)

    def begin_at(first: Tensor) -> bool:
        allowed, before = (mask.function(batch, batch, queries, keys) for keys in (first, first - 1))
        return bool((allowed & ~before).all())

    if begin_at(queries - reach + 1):
        return False
    if begin_at(queries // reach * reach):
        return True
    raise ValueError(
        f"trainer.attention=varlen: of {reach} positions, queries attend neither to the last nor by chunks"
    )


def _by_loop(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **options: Any
) -> tuple[Tensor, None]:
    """Compute chain by chain. Windows that are shorter than a sequence need masks, which `dense` makes."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as whole  # takes seconds to import

    if not mask.is_causal:
        return dense.attend(module, query, key, value, mask, **options)
    q, k, v = (_as_string(heads).transpose(0, 1)[None] for heads in (query, key, value))  # [1, H, N * L, D]
    bounds = [*mask.rows.starts.tolist(), mask.rows.input_ids.numel()]
    places = [slice(begin, end) for begin, end in pairwise(bounds)]
    parts = [whole(module, q[:, :, chain], k[:, :, chain], v[:, :, chain], None, **options)[0] for chain in places]
    return torch.cat(parts, dim=1).view(len(query), -1, *parts[0].shape[2:]), None


def _as_string(heads: Tensor) -> Tensor:
    """[N, H, L, D] -> [N * L, H, D]."""
    return heads.transpose(1, 2).flatten(0, 1)
