"""Attention within rows of trees: dense, flex or varlen, by one rank or by a group that shares its rows.

A model builds its own masks, of every kind that its layers need, from functions of a query's and a key's position:
causal, sliding window, chunked. Here they are evaluated at the tokens' positions in their sequences instead of their
places in the row, and cut down to a token's ancestors in the tree. So each sequence attends as it would alone.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from configs.trainer import AttentionKind
from configs.validate import ConfigError
from trainer.batch import MicroBatch
from trainer.worker.attention import dense, flex, varlen
from trainer.worker.attention.rows import Attend, Mask, MaskFunction, Rows
from trainer.worker.attention.ulysses import SequenceGroup

HANDED_ON = ("sdpa", "flex_attention")
"""Implementations of attention, by their names in transformers, that a model hands its mask on to as it is."""
BOOL, FLOAT = "sdpa", "eager"
"""Implementations of models with code of their own, which take a mask of all pairs as a tensor."""
LONGEST_MASK = 8192
"""Tokens of the longest row for which such a mask is made."""
CORES: dict[AttentionKind, Any] = {
    AttentionKind.dense: dense.attend,
    AttentionKind.flex: flex.attend,
    AttentionKind.varlen: varlen.attend,
}


@dataclass(frozen=True, slots=True)
class Attention:
    """The implementation that computes attention, and the ranks that share the rows.

    Example:
        attention = Attention(AttentionKind.auto)
        attention.prepare(causal_lm)
        rows = attention.rows(batch, device)
        with attention.within(rows, decoder):
            decoder(input_ids=rows.input_ids, position_ids=rows.positions)
    """

    kind: AttentionKind = AttentionKind.auto
    device_type: str = "cpu"
    group: SequenceGroup | None = None

    def prepare(self, model: Any) -> None:
        """Let a model compute what transformers' SDPA leaves out: a soft cap of attention's logits.

        Raises:
            ConfigError: ranks cannot share its attention.
        """
        config, architecture = model.config.get_text_config(), type(model).__name__
        is_own = config._attn_implementation == FLOAT or config.to_dict().get("attn_logit_softcapping")
        if is_own:
            needs_flex = self.device_type != "cpu" and model._supports_flex_attn
            model.set_attn_implementation("flex_attention" if needs_flex else FLOAT)
        if self.group is None:
            return
        key = f"trainer.sequence_parallel={self.group.size}"
        if (num_heads := config.num_attention_heads) % self.group.size:
            raise ConfigError(f"{key}: must divide the {num_heads} attention heads of {architecture}")
        if takes_tensors(model):
            raise ConfigError(f"{key}: {architecture} has attention of its own, which ranks cannot share: set it to 1")

    def rows(self, batch: MicroBatch, device: torch.device) -> Rows:
        return Rows.of(batch, self._length(batch), device)

    def num_tokens(self, batch: MicroBatch) -> int:
        """Return how many tokens are computed, padding included."""
        return len(batch.input_ids) * self._length(batch)

    def _length(self, batch: MicroBatch) -> int:
        """Return the padded length of the rows. The ranks can share it. On GPUs it is one of a few lengths, because
        kernels are compiled for each."""
        multiple, length = 1 if self.group is None else self.group.size, batch.input_ids.shape[1]
        if self.device_type != "cpu":
            length = bucket(length)
        return -(-length // multiple) * multiple

    @contextmanager
    def within(self, rows: Rows, decoder: nn.Module, attend: Attend | None = None) -> Iterator[None]:
        """Let the decoder attend in these rows inside the `with` block, and in what is recomputed of it afterwards.

        A model that does not build its masks by transformers' `masking_utils` is not reached: its branches see each
        other.

        Args:
            attend: what computes attention in place of `attend`.
        """
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as BUILDERS  # takes seconds to import

        _let_masks_pass()
        masks = _Masks(rows, attend or self.attend, self.device_type)
        builders: dict[str, Any] = dict.fromkeys(HANDED_ON, masks.handed_on)
        if rows.last is not None:
            builders[FLOAT] = masks.as_floats
        if not hands_masks_on(decoder):
            builders[BOOL] = BUILDERS[BOOL] if rows.last is None else masks.as_booleans
        for name, builder in builders.items():
            BUILDERS[name] = builder
        try:
            yield
        finally:
            for name in builders:
                del BUILDERS[name]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **options: Any
    ) -> tuple[Tensor, None]:
        """Compute attention as transformers calls it, [N, H, L, D] -> [N, L, H, D]."""
        if self.group is None:
            return self._of_whole_rows(module, query, key, value, mask, **options)
        return self.group.attend(self._of_whole_rows, module, (query, key, value), mask, **options)

    def _of_whole_rows(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **options: Any
    ) -> tuple[Tensor, None]:
        kind = self.kind if self.kind is not AttentionKind.auto else chosen(query, value, mask, options)
        return CORES[kind](module, query, key, value, mask, **options)


ON_CPU = Attention()
"""The attention of a single rank on the CPU."""


def chosen(query: Tensor, value: Tensor, mask: Mask, options: dict[str, Any]) -> AttentionKind:
    """Return the implementation that trainer.attention=auto takes for these heads and rows."""
    is_plain, refusal = mask.rows.last is None and mask.is_causal, varlen.refusal(query, value, mask, options)
    if mask.device_type == "cpu":
        is_dense = is_plain or refusal is not None or not mask.is_causal
        return AttentionKind.dense if is_dense else AttentionKind.varlen
    if refusal is None:
        return AttentionKind.varlen
    if any(options.get(name) is not None for name in varlen.UNKNOWN):
        return AttentionKind.flex
    # SDPA needs no mask for whole rows. In float32 models are small: to compile flex for each length would take longer.
    return AttentionKind.dense if is_plain or query.dtype is torch.float32 else AttentionKind.flex


def bucket(length: int) -> int:
    """Return the next length for which kernels are compiled: of a short row in whole blocks, at most an eighth
    longer."""
    multiple = max(flex.BLOCK, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // multiple) * multiple


def hands_masks_on(model: nn.Module) -> bool:
    """Return whether attention gets the model's mask as it was built, as in all models whose attention is
    exchangeable."""
    return "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(model).__module__])


def takes_tensors(model: Any) -> bool:
    """Return whether the model's masks are tensors of all pairs of a row."""
    return model.config.get_text_config()._attn_implementation == FLOAT or not hands_masks_on(model)


def _let_masks_pass() -> None:
    """Let a `Mask` pass through the model to `attend`.

    The change is for good, because layers that are recomputed in the backward pass run after the `with` block. Masks of
    other kinds go where they went before.
    """
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTION

    for name, original in zip(HANDED_ON, (sdpa_attention_forward, flex_attention_forward), strict=True):
        ATTENTION[name] = _letting_pass(original)


def _letting_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        function = attention_mask.attend if isinstance(attention_mask, Mask) else original
        return function(module, query, key, value, attention_mask, **options)

    return attend


@dataclass(frozen=True, slots=True)
class _Masks:
    """The masks of the rows in the forms that implementations of attention take. transformers calls the methods."""

    rows: Rows
    attend: Attend
    device_type: str

    def handed_on(
        self, *, mask_function: MaskFunction, local_size: int | None = None, use_vmap: bool = False, **options: Any
    ) -> Mask:
        """Return a mask that the model hands on to `attend`."""
        from transformers.masking_utils import causal_mask_function

        _refuse_more_than_positions(use_vmap or (local_size is None and mask_function is not causal_mask_function))
        return Mask(self.rows, mask_function, local_size, self.attend, self.device_type)

    def as_booleans(self, *, mask_function: MaskFunction, use_vmap: bool = False, **options: Any) -> Tensor:
        """Return [N, 1, L, L], True where the query attends to the key."""
        _refuse_more_than_positions(use_vmap)
        if (length := self.rows.input_ids.shape[1]) > LONGEST_MASK:
            raise ValueError(f"a row of {length} tokens: masks of all pairs are made up to {LONGEST_MASK}")
        places = torch.arange(length, device=self.rows.ends.device)
        return Mask(self.rows, mask_function, 0, dense.attend).allowed(slice(None), places)

    def as_floats(self, *, dtype: torch.dtype, **options: Any) -> Tensor:
        """Return [N, 1, L, L], the numbers that are added to the query's logit of the key."""
        allowed = self.as_booleans(**options)
        return torch.zeros((), dtype=dtype, device=allowed.device).where(allowed, torch.finfo(dtype).min)


def _refuse_more_than_positions(is_more: bool) -> None:
    if is_more:
        raise NotImplementedError("its attention masks depend on more than the positions of two tokens")
