"""Rows whose places belong to several versions, computed version by version on the keys and values of those before."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.old_logprobs import Segment
from trainer.worker.attention.attention import Attention
from trainer.worker.attention.rows import Mask
from trainer.worker.routing import Routing

# The attention of a segment goes through the run's own implementation, over the tokens that its own tokens attend to.
# Queries of the others are 0, and what comes out of them is left out.


class SegmentCache:
    """The keys and values of one whole row, [1, H, L, D] by layer, filled segment by segment.

    Not a dataclass: FSDP copies those that it passes to a forward method, with all that they hold.
    """

    def __init__(self, length: int):
        """`length`: the number of places of the row."""
        self._length = length
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def attend(
        self,
        attention: Attention,
        segment: Segment,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention of the segment's own tokens, [1, H, Q, D] -> [1, Q, H, D], to all that it needs."""
        needed, own = (torch.as_tensor(places, device=key.device) for places in (segment.needed, segment.own))
        length = mask.rows.input_ids.shape[1]
        if module not in self._layers:
            self._layers[module] = self._empty(key), self._empty(value)
        keys, values = self._layers[module]
        if not segment.is_idle:
            keys[:, :, needed[own]], values[:, :, needed[own]] = key, value
        queries = query.new_zeros(*query.shape[:2], length, query.shape[3])
        queries[:, :, own] = query
        needed_keys, needed_values = (_padded(heads[:, :, needed], length) for heads in (keys, values))
        attended, _ = attention.attend(module, queries, needed_keys, needed_values, mask, **options)
        return attended[:, own], None

    def _empty(self, heads: Tensor) -> Tensor:
        return heads.new_zeros(*heads.shape[:2], self._length, heads.shape[3])


def _padded(heads: Tensor, length: int) -> Tensor:
    """[1, H, K, D] -> [1, H, length, D]."""
    return nn.functional.pad(heads, (0, 0, 0, length - heads.shape[2]))


def decode_segment(
    decoder: nn.Module,
    segment: Segment,
    cache: SegmentCache,
    device: torch.device,
    attention: Attention,
    routing: Routing,
) -> tuple[type, Tensor]:
    """Run the decoder over the segment's own tokens. Return its class of outputs, and the state of each target."""
    rows = attention.rows(segment.batch, device)
    own = torch.as_tensor(segment.own, device=device)
    input_ids, position_ids = rows.input_ids[:, own], rows.positions[:, own]
    routes = segment.batch.routes
    routing.follow(None if routes is None else routes[:, segment.own], device)
    with attention.within(rows, decoder, partial(cache.attend, attention, segment)):
        # Without a mask of ones, transformers would guess sequences from the positions.
        outputs = decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=torch.ones_like(input_ids),
            use_cache=False,
        )
    return type(outputs), outputs.last_hidden_state[0, torch.as_tensor(segment.batch.sources, device=device)]
