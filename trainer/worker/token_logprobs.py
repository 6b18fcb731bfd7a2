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

COLUMNS = 4096
"""Words of the vocabulary in a chunk of logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRule:
    """How a model makes logits of what its head, a linear layer, returns: x -> cap * tanh(scale * x / cap)."""

    scale: float = 1.0
    soft_cap: float | None = None
    """None: x -> scale * x."""

    def __call__(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x if self.soft_cap is None else (x / self.soft_cap).tanh() * self.soft_cap


class Asked(NamedTuple):
    """What `token_logprobs` is asked for, besides its tensors."""

    temperature: float
    rule: LogitRule
    entropy_has_gradient: bool
    columns: int
    """Words of the vocabulary in a chunk."""
    tokens: int
    """Tokens in a chunk."""


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
) -> tuple[Tensor, Tensor]:
    """Return (logprobs [T], entropy [T]) of softmax(logits / temperature), logits = rule(hidden @ weight.T + bias).

    They are float32, as are all sums, and float64 if `hidden` is. The gradients are those of `hidden`, `weight` and
    `bias`, each in its own dtype. The logprob of a target outside of the vocabulary is NaN.

    Args:
        hidden: [T, H], of the dtype of `weight` [V, H] and `bias` [V].
        targets: [T], int64.
        max_logits: that are in memory at once; by the device, if not given.
    """
    columns = max(1, min(len(weight), COLUMNS, max_logits or COLUMNS))
    tokens = max(1, (max_logits or CHUNK_LOGITS[hidden.device.type]) // columns)
    asked = Asked(temperature, rule, entropy_has_gradient, columns, tokens)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, asked)  # pyright: ignore
    return logprobs, entropy


class _TokenLogprobs(Function):
    """The vocabulary is the outer loop: a chunk of the weight and of its gradient stays at hand for all tokens."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, asked: Asked
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, bias, targets, asked)
        sums = _Sums.of_nothing(len(hidden), head.dtype, hidden.device)
        for part in head.parts():
            for rows in _slices(len(hidden), asked.tokens):
                sums.add(rows, part.logits(rows), *part.targets(rows))
        log_total = sums.total.log()
        entropy = log_total - sums.weighted / sums.total
        ctx.asked = asked
        ctx.save_for_backward(hidden, weight, bias, targets, sums.peak, sums.total, entropy)
        if not asked.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return sums.chosen - sums.peak - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, peak, total, entropy = ctx.saved_tensors
        head = _Head(hidden, weight, bias, targets, ctx.asked)
        slopes = _Slopes.of(ctx.asked, of_logprobs, of_entropy, peak, total, entropy)
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        to_hidden = torch.zeros_like(hidden, dtype=head.dtype) if needs_hidden else None
        to_weight = torch.zeros_like(weight) if needs_weight else None
        to_bias = torch.zeros_like(bias, dtype=head.dtype) if needs_bias else None
        for part in head.parts():
            to_part = None if to_weight is None else to_weight[part.columns].to(head.dtype)  # itself, in float32
            for rows in _slices(len(hidden), ctx.asked.tokens):
                gradient = slopes.of_product(rows, part.logits(rows), *part.targets(rows))
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

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, asked: Asked):
        self.dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        """Of logits and sums."""
        self.hidden = hidden if hidden.is_cuda else hidden.to(self.dtype)
        self.targets = targets
        self.asked = asked
        self._weight = weight
        self._bias = bias

    def parts(self) -> "Iterator[_Part]":
        for columns in _slices(len(self._weight), self.asked.columns):
            weight = self._weight[columns].to(self.hidden.dtype)
            bias = None if self._bias is None else self._bias[columns].to(self.dtype)
            yield _Part(self, columns, weight, bias)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some columns of the logits."""

    head: _Head
    columns: slice
    weight: Tensor
    bias: Tensor | None

    def logits(self, rows: slice) -> Tensor:
        """[t, v], over the temperature."""
        asked = self.head.asked
        logits = _product(self.head.hidden[rows], self.weight.T)
        if self.bias is not None:
            logits += self.bias
        cap, scale = asked.rule.soft_cap, asked.rule.scale
        if cap is not None:
            return logits.mul_(scale / cap).tanh_().mul_(cap / asked.temperature)
        return logits if scale == asked.temperature else logits.mul_(scale / asked.temperature)

    def targets(self, rows: slice) -> tuple[Tensor, Tensor]:
        """[t, 1] each: the targets' columns, any where they are in another part; and whether they are in this."""
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
    def of_nothing(cls, size: int, dtype: torch.dtype, device: torch.device) -> "_Sums":
        values = (torch.finfo(dtype).min, 0.0, 0.0, torch.nan)
        return cls(*(torch.full((size,), value, dtype=dtype, device=device) for value in values))

    def add(self, rows: slice, logits: Tensor, place: Tensor, is_inside: Tensor) -> None:
        """Overwrites `logits`."""
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

    asked: Asked
    peak: Tensor
    of_target: Tensor
    constant: Tensor
    linear: Tensor | None

    @classmethod
    def of(
        cls, asked: Asked, of_logprobs: Tensor, of_entropy: Tensor, peak: Tensor, total: Tensor, entropy: Tensor
    ) -> "_Slopes":
        factor = asked.rule.scale / asked.temperature
        of_target, linear = of_logprobs * factor, None
        constant = -of_target / total
        if asked.entropy_has_gradient:
            linear = -of_entropy * factor / total
            constant = constant + linear * (entropy - total.log())
        return cls(asked, peak, of_target, constant, linear)

    def of_product(self, rows: slice, logits: Tensor, place: Tensor, is_inside: Tensor) -> Tensor:
        """[t, v]: the gradient of hidden @ weight.T. Overwrites `logits`."""
        cap, bend = self.asked.rule.soft_cap, None
        if cap is not None:
            bend = 1 - (logits * (self.asked.temperature / cap)).square_()
        logits.sub_(self.peak[rows, None])
        if self.linear is None:
            gradient = logits.exp_().mul_(self.constant[rows, None])
        else:
            powers = logits.exp()
            gradient = logits.mul_(self.linear[rows, None]).add_(self.constant[rows, None]).mul_(powers)
        gradient.scatter_add_(1, place, self.of_target[rows, None] * is_inside)
        return gradient if bend is None else gradient.mul_(bend)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(size, start + step)) for start in range(0, size, step))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """In float32 at least."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == into.dtype:
        into.addmm_(a, b)
    else:
        into += _product(a, b)
