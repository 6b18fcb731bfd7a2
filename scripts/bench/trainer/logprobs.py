"""Logprobs of hidden states: `token_logprobs` against logits in checkpointed chunks, and against all logits at once."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scripts.bench.common import interleaved, median_ratio, show_table
from scripts.bench.trainer.memory import Memory
from trainer.worker.head import MAX_LOGITS
from trainer.worker.token_logprobs import CHUNK_LOGITS, LogitRule, token_logprobs

LogprobsOf = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden [T, H], weight [V, H], targets [T]) -> (logprobs [T], entropy [T])."""
TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    tokens: int = 4096
    vocabulary: int = 151_936
    hidden: int = 896


TINY = Shape(tokens=2048, vocabulary=512, hidden=64)
"""A micro-batch of the default run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seconds: float
    """Of forward and backward."""
    gradient: Tensor
    """Of the hidden states, and that of a few words' rows of the weight."""


def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once."""
    logits = (hidden @ weight.T).float() / TEMPERATURE
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    with torch.no_grad():
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return logprobs, entropy


def checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """At most MAX_LOGITS at once, made again in the backward pass; all of them, if they are fewer."""
    chunk = MAX_LOGITS // len(weight)
    if len(hidden) <= chunk:
        return dense(hidden, weight, targets)
    parts = [
        checkpoint(dense, h, weight, t, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])  # pyright: ignore


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return token_logprobs(
        hidden,
        weight,
        None,
        targets,
        temperature=TEMPERATURE,
        rule=LogitRule(),
        entropy_has_gradient=False,
        max_logits=CHUNK_LOGITS["cpu"],
    )


ARMS: Mapping[str, LogprobsOf] = {"checkpointed": checkpointed, "fused": fused}


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed: inputs, and the gradient of the logprobs."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    weights: Tensor

    @classmethod
    def of(cls, shape: Shape, device: str) -> "Work":
        random = torch.Generator().manual_seed(0)
        hidden = torch.randn(shape.tokens, shape.hidden, generator=random).to(device)
        if device == "meta":
            weight = torch.empty(shape.vocabulary, shape.hidden, device=device)
        else:
            weight = torch.randn(shape.vocabulary, shape.hidden, generator=random) * 3 / shape.hidden**0.5
        targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=random).to(device)
        weights = torch.randn(shape.tokens, generator=random).to(device)
        return cls(hidden.requires_grad_(), weight.requires_grad_(), targets, weights)

    def forward_backward(self, logprobs_of: LogprobsOf) -> None:
        self.hidden.grad = self.weight.grad = None
        (logprobs_of(self.hidden, self.weight, self.targets)[0] * self.weights).sum().backward()


async def run(work: Work, logprobs_of: LogprobsOf, times: int, repetition: int) -> Outcome:
    started = time.perf_counter()
    for _ in range(times):
        work.forward_backward(logprobs_of)
    seconds = (time.perf_counter() - started) / times
    assert work.hidden.grad is not None and work.weight.grad is not None
    return Outcome(seconds=seconds, gradient=torch.cat([work.hidden.grad, work.weight.grad[::97]]))


def peak_bytes(shape: Shape, logprobs_of: LogprobsOf) -> int:
    """Of forward and backward, the gradients included: counted, with tensors that have no memory."""
    work = Work.of(shape, "meta")
    with Memory() as memory:
        work.forward_backward(logprobs_of)
    return memory.peak


async def measure(shape: Shape, tiny_shape: Shape, repeats: int) -> dict[str, float]:
    """Show a table. Returns the figures of the last line."""
    tiny = await _timed(tiny_shape, 3 * repeats, times=20)
    large = await _timed(shape, repeats, times=1)
    peaks = {name: peak_bytes(shape, one) / 1e9 for name, one in [("dense", dense), *ARMS.items()]}
    rows = [[name, f"{large.get(name, 0):.1f}" if name in large else "", f"{peaks[name]:.2f}"] for name in peaks]
    title = f"logprobs of {shape.tokens} tokens, vocabulary {shape.vocabulary}, hidden {shape.hidden}"
    show_table(title, ["", "seconds", "GB"], rows)
    return {
        **{f"logprobs_seconds_{name}": large[name] for name in ARMS},
        **{f"logprobs_gb_{name}": peak for name, peak in peaks.items()},
        "logprobs_speedup": large["speedup"],
        "logprobs_speedup_tiny": tiny["speedup"],
        "logprobs_memory_over_dense": peaks["fused"] / peaks["dense"],
        "logprobs_difference_ppm": large["difference_ppm"],
    }


async def _timed(shape: Shape, repeats: int, times: int) -> dict[str, float]:
    work = Work.of(shape, "cpu")
    arms = {name: partial(run, work, one, times) for name, one in ARMS.items()}
    await interleaved(arms, 1)  # the first of each pays for memory
    outcomes = await interleaved(arms, repeats)
    before, after = ([one.seconds for one in outcomes[name]] for name in ("checkpointed", "fused"))
    expected, found = (outcomes[name][0].gradient for name in ("checkpointed", "fused"))
    return {
        **{name: sorted(one.seconds for one in outcomes[name])[repeats // 2] for name in ARMS},
        "speedup": median_ratio(before, after),
        "difference_ppm": 1e6 * ((found - expected).norm() / expected.norm()).item(),
    }
