"""Attention of chains end to end, without masks: flash attention over sequences of any lengths, on CPUs by a loop."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.worker.attention import dense
from trainer.worker.attention.rows import Mask

LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
"""Of flash attention."""
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Of these, torch's flash attention knows nothing."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **given: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, [N, H, L, D] -> [N, L, H, D].

    Raises:
        ValueError: it cannot.
    """
    if (reason := refusal(query, value, mask, given)) is not None:
        raise ValueError(f"trainer.attention=varlen: {reason}")
    if query.device.type == "cpu":
        return _by_loop(module, query, key, value, mask, **given)
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest, window = segments(mask)
    attended = varlen_attn(
        _as_string(query),
        _as_string(key),
        _as_string(value),
        bounds,
        bounds,
        longest,
        longest,
        scale=given.get("scaling"),
        window_size=(window, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended.view(len(query), -1, *attended.shape[1:]), None


def refusal(query: Tensor, value: Tensor, mask: Mask, given: dict[str, Any]) -> str | None:
    """Why these rows or this module cannot be computed here, or None."""
    if not mask.rows.are_chains:
        return "rows have branches"
    if found := [name for name in UNKNOWN if given.get(name) is not None]:
        return f"flash attention knows no {found[0]}"
    if query.device.type == "cpu":
        return None
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention computes in bfloat16, not in {query.dtype}"
    width, of_values = query.shape[-1], value.shape[-1]
    if width != of_values or width > LARGEST_HEAD or width % HEAD_MULTIPLE:
        return f"flash attention has no heads of width {width} and {of_values}"
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
    """Whether queries attend within chunks of `reach` positions, instead of to the last `reach` positions.

    Raises:
        ValueError: neither.
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
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **given: Any
) -> tuple[Tensor, None]:
    """Windows that are shorter than a sequence need masks."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as whole  # takes seconds to import

    if not mask.is_causal:
        return dense.attend(module, query, key, value, mask, **given)
    q, k, v = (_as_string(one).transpose(0, 1)[None] for one in (query, key, value))  # [1, H, N * L, D]
    bounds = [*mask.rows.starts.tolist(), mask.rows.input_ids.numel()]
    places = [slice(begin, end) for begin, end in pairwise(bounds)]
    parts = [whole(module, q[:, :, one], k[:, :, one], v[:, :, one], None, **given)[0] for one in places]
    return torch.cat(parts, dim=1).view(len(query), -1, *parts[0].shape[2:]), None


def _as_string(heads: Tensor) -> Tensor:
    """[N, H, L, D] -> [N * L, H, D]."""
    return heads.transpose(1, 2).flatten(0, 1)
