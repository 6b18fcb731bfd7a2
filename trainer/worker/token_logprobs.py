"""Logprobs and entropies of chosen tokens from hidden states and the head's weight, without ever holding all logits.

Logits are made in chunks over the vocabulary and the tokens, reduced at once, and made again in the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from configs.trainer import CHUNK_LOGITS
from rollout.types import KeptTokens

COLUMNS = 4096
"""Words of the vocabulary in a chunk of logits."""
LEFT_OUT = -1e30
"""The logit of a token that sampling left out: its probability is 0, and with infinity the sums of the entropy would be
NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRule:
    """The rule by which a model makes logits of what its head, a linear layer, returns: x -> cap * tanh(scale * x /
    cap)."""

    scale: float = 1.0
    soft_cap: float | None = None
    """None: x -> scale * x."""

    def __call__(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x if self.soft_cap is None else (x / self.soft_cap).tanh() * self.soft_cap


class LeftOut:
    """The tokens that sampling left out of what it drew from, for chunks of logits.

    Example:
        left_out = LeftOut(kept, vocab_size, device=logits.device)
        logits.masked_fill_(left_out.mask(slice(0, 2), slice(0, vocab_size)), LEFT_OUT)
    """

    def __init__(
        self, kept: KeptTokens, vocab_size: int, device: torch.device, tokens: int = 2**62, columns: int = 2**62
    ):
        """
        Args:
            kept: of all T tokens.
            tokens, columns: the size of a chunk.
        """
        lengths, token_ids = torch.as_tensor(kept.lengths, device=device), torch.as_tensor(kept.token_ids)
        self._tokens, self._columns = tokens, columns
        self._across = -(-vocab_size // columns)
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        token_ids = token_ids.to(device, torch.int64)
        chunks, order = (rows // tokens * self._across + token_ids // columns).sort(stable=True)
        self._rows, self._token_ids = rows[order], token_ids[order]
        count = -(-len(lengths) // tokens) * self._across
        # On the host, so that no chunk has to wait for the device to learn where its own begin.
        self._bounds = torch.searchsorted(chunks, torch.arange(count + 1, device=device)).tolist()
        self._is_whole = None if bool(kept.lengths.all()) else lengths == 0

    def mask(self, rows: slice, columns: slice) -> Tensor:
        """[t, v] bool: True at the tokens that were left out of the chunk."""
        number = rows.start // self._tokens * self._across + columns.start // self._columns
        own = slice(self._bounds[number], self._bounds[number + 1])
        shape = rows.stop - rows.start, columns.stop - columns.start
        mask = torch.ones(shape, dtype=torch.bool, device=self._rows.device)
        mask[self._rows[own] - rows.start, self._token_ids[own] - columns.start] = False
        return mask if self._is_whole is None else mask & ~self._is_whole[rows, None]


class Options(NamedTuple):
    """The options of `token_logprobs`, besides its tensors."""

    temperature: float
    rule: LogitRule
    entropy_has_gradient: bool
    columns: int
    """Words of the vocabulary in a chunk."""
    tokens: int
    """Tokens in a chunk."""
    is_on_gpu: bool
    left_out: LeftOut | None
    """None: all logprobs are normalized over the whole vocabulary."""


def token_logprobs(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    rule: LogitRule,
    entropy_has_gradient: bool,
    max_logits: int | None = None,
    device_type: str | None = None,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs [T], entropy [T]) of softmax(logits / temperature), logits = rule(hidden @ weight.T + bias).

    They are float32, as are all sums, and float64 if `hidden` is. The gradients are those of `hidden`, `weight` and
    `bias`, each in its own dtype. The logprob of a target outside of the vocabulary is NaN.

    Args:
        hidden: [T, H], of the dtype of `weight` [V, H] and `bias` [V].
        targets: [T], int64.
        max_logits: that are in memory at once; by the device, if not given.
        device_type: the kind of device that is computed for; that of `hidden`, if not given.
        kept: the tokens that each target was drawn from, which the softmax is over; the whole vocabulary, if not given.
    """
    kind = device_type or hidden.device.type
    columns = max(1, min(len(weight), COLUMNS, max_logits or COLUMNS))
    tokens = max(1, (max_logits or CHUNK_LOGITS[kind]) // columns)
    left_out = None if kept is None else LeftOut(kept, len(weight), hidden.device, tokens, columns)
    options = Options(temperature, rule, entropy_has_gradient, columns, tokens, kind == "cuda", left_out)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, options)  # pyright: ignore
    return logprobs, entropy


class _TokenLogprobs(Function):
    """The vocabulary is the outer loop: a chunk of the weight and of its gradient stays at hand for all tokens."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: Options
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, bias, targets, options)
        sums = _Sums.empty(len(hidden), head.dtype, hidden.device)
        for part in head.parts():
            for rows in _slices(len(hidden), options.tokens):
                sums.add(rows, part.logits(rows), *part.targets(rows))
        log_total = sums.total.log()
        entropy = log_total - sums.weighted / sums.total
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, targets, sums.peak, sums.total, entropy)
        if not options.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return sums.chosen - sums.peak - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprobs_gradient: Tensor, entropy_gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, peak, total, entropy = ctx.saved_tensors
        head = _Head(hidden, weight, bias, targets, ctx.options)
        slopes = _Slopes.of(ctx.options, logprobs_gradient, entropy_gradient, peak, total, entropy)
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        to_hidden = torch.zeros_like(hidden, dtype=head.dtype) if needs_hidden else None
        to_weight = torch.zeros_like(weight) if needs_weight else None
        to_bias = torch.zeros_like(bias, dtype=head.dtype) if needs_bias else None
        for part in head.parts():
            to_part = None if to_weight is None else to_weight[part.columns].to(head.dtype)  # itself, in float32
            for rows in _slices(len(hidden), ctx.options.tokens):
                gradient = slopes.logits_gradient(rows, part.logits(rows), *part.targets(rows))
                if to_bias is not None:
                    to_bias[part.columns] += gradient.sum(0)
                gradient = gradient.to(head.hidden.dtype)
                if to_hidden is not None:
                    _add_product(to_hidden[rows], gradient, part.weight)
                if to_part is not None:
                    _add_product(to_part, gradient.T, head.hidden[rows])
            if to_weight is not None and to_part is not None and to_weight.dtype != head.dtype:
                to_weight[part.columns] = to_part
        to_hidden = None if to_hidden is None else to_hidden.to(hidden.dtype)
        return to_hidden, to_weight, None if to_bias is None else to_bias.to(bias.dtype), None, None


class _Head:
    """The tensors, as they are multiplied: half precision on GPUs, whose products sum in float32; else float32."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: Options):
        self.dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        """The type of logits and sums."""
        self.hidden = hidden if options.is_on_gpu else hidden.to(self.dtype)
        self.targets = targets
        self.options = options
        self._weight = weight
        self._bias = bias

    def parts(self) -> "Iterator[_Part]":
        for columns in _slices(len(self._weight), self.options.columns):
            weight = self._weight[columns].to(self.hidden.dtype)
            bias = None if self._bias is None else self._bias[columns].to(self.dtype)
            yield _Part(self, columns, weight, bias)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the logits: some of their columns."""

    head: _Head
    columns: slice
    weight: Tensor
    bias: Tensor | None

    def logits(self, rows: slice) -> Tensor:
        """Return the logits [t, v], divided by the temperature; LEFT_OUT for tokens that sampling left out."""
        options = self.head.options
        logits = _product(self.head.hidden[rows], self.weight.T)
        if self.bias is not None:
            logits += self.bias
        cap, scale = options.rule.soft_cap, options.rule.scale
        if cap is not None:
            logits.mul_(scale / cap).tanh_().mul_(cap / options.temperature)
        elif scale != options.temperature:
            logits.mul_(scale / options.temperature)
        if options.left_out is not None:
            logits.masked_fill_(options.left_out.mask(rows, self.columns), LEFT_OUT)
        return logits

    def targets(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return [t, 1] each: the targets' columns, any where they are in another part; and whether they are in
        this."""
        place = self.head.targets[rows, None] - self.columns.start
        inside = place.clamp(0, len(self.weight) - 1)
        return inside, inside == place


class _Sums(NamedTuple):
    """[T] each, over the columns so far."""

    peak: Tensor
    """The largest logit."""
    total: Tensor
    """The sum of e = exp(logit - peak)."""
    weighted: Tensor
    """The sum of e * (logit - peak)."""
    chosen: Tensor
    """The target's logit."""

    @classmethod
    def empty(cls, size: int, dtype: torch.dtype, device: torch.device) -> "_Sums":
        values = (torch.finfo(dtype).min, 0.0, 0.0, torch.nan)
        return cls(*(torch.full((size,), value, dtype=dtype, device=device) for value in values))

    def add(self, rows: slice, logits: Tensor, place: Tensor, is_inside: Tensor) -> None:
        """Add the logits [t, v] of these rows. Overwrites `logits`."""
        peak, total, weighted, chosen = (sums[rows] for sums in self)
        chosen.copy_(torch.where(is_inside, logits.gather(1, place), chosen[:, None])[:, 0])
        highest = torch.maximum(peak, logits.amax(1))
        drop = peak - highest
        kept = drop.exp()
        logits.sub_(highest[:, None])
        powers = logits.exp()
        weighted.add_(drop * total).mul_(kept).add_(logits.mul_(powers).sum(1))
        total.mul_(kept).add_(powers.sum(1))
        peak.copy_(highest)


class _Slopes(NamedTuple):
    """The gradient of a logit l with softmax p: g * (is target - p) - k * p * (log p + entropy).

    g and k are the gradients of logprob and entropy. With d = l - peak and p = exp(d) / total, it is
    `of_target` at the target, and exp(d) * (constant + linear * d) everywhere.
    """

    options: Options
    peak: Tensor
    target_slope: Tensor
    constant: Tensor
    linear: Tensor | None

    @classmethod
    def of(
        cls,
        options: Options,
        logprobs_gradient: Tensor,
        entropy_gradient: Tensor,
        peak: Tensor,
        total: Tensor,
        entropy: Tensor,
    ) -> "_Slopes":
        factor = options.rule.scale / options.temperature
        target_slope, linear = logprobs_gradient * factor, None
        constant = -target_slope / total
        if options.entropy_has_gradient:
            linear = -entropy_gradient * factor / total
            constant = constant + linear * (entropy - total.log())
        return cls(options, peak, target_slope, constant, linear)

    def logits_gradient(self, rows: slice, logits: Tensor, place: Tensor, is_inside: Tensor) -> Tensor:
        """Return [t, v] the gradient of hidden @ weight.T. Overwrites `logits`."""
        cap, bend = self.options.rule.soft_cap, None
        if cap is not None:
            bend = 1 - (logits * (self.options.temperature / cap)).square_()
            if self.options.left_out is not None:
                bend.clamp_(min=0)  # else that of LEFT_OUT is minus infinity, and NaN times its gradient of 0
        logits.sub_(self.peak[rows, None])
        if self.linear is None:
            gradient = logits.exp_().mul_(self.constant[rows, None])
        else:
            powers = logits.exp()
            gradient = logits.mul_(self.linear[rows, None]).add_(self.constant[rows, None]).mul_(powers)
        gradient.scatter_add_(1, place, self.target_slope[rows, None] * is_inside)
        return gradient if bend is None else gradient.mul_(bend)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(size, start + step)) for start in range(0, size, step))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply with sums in float32 at least."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == into.dtype:
        into.addmm_(a, b)
    else:
        into += _product(a, b)
