"""The question: what do a train worker's own parts cost? Twelve minutes on two cores.

python -m scripts.bench.trainer [--repeats 3]

- `logprobs`: logprobs and entropies of random hidden states, forward and backward in float32 on the CPU. The arms are
  `fused` (`trainer/worker/token_logprobs.py`) and `checkpointed` (logits in chunks that the backward pass computes
  again). `_tiny` is the same for a micro-batch of the default run. Memory is counted on torch's `meta` device: the
  bytes that are alive at once, gradients included, hidden states and weight not. `dense` is all logits at once.
- `packing`: forward and backward of a small model over sequences of log-normal lengths: `packed` puts them end to end,
  `rows` gives each a padded row, sorted by length. Seconds are those of the process on its core.

Speedups are seconds of the other arm over those of `fused` and `packed`. logprobs_difference_ppm is that of the
gradients, in millionths of them.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from configs.schema import Layout
from scripts.bench.harness import Figures, Runs, make_parser, show_figures, take_turns
from scripts.observe.tables import write_json
from scripts.plan.rehearsal.rehearsal import make_group
from trainer.batch import assemble
from trainer.tiny.model import VOCAB_SIZE, ModelSize, build_model
from trainer.tokens import sampled_tokens
from trainer.worker.counted_memory import Memory
from trainer.worker.head import MAX_LOGITS
from trainer.worker.model import Policy
from trainer.worker.token_logprobs import CHUNK_LOGITS, LogitRule, token_logprobs

LogprobsOf = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden [T, H], weight [V, H], targets [T]) -> (logprobs [T], entropy [T])."""
TEMPERATURE = 0.7
CPU = torch.device("cpu")
PROMPT, SPREAD = 32, 0.8
"""The tokens of a prompt, and the standard deviation of the logarithm of a response's."""


def main() -> None:
    repeats = make_parser(__doc__, repeats=3).parse_args().repeats
    torch.set_num_threads(1)  # as a train worker on CPUs
    logprobs = asyncio.run(measure_logprobs(Shape(), TINY, repeats))
    write_json(logprobs | asyncio.run(measure_packing(PackingShape(), repeats)))


# -- logprobs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    tokens: int = 4096
    vocabulary: int = 151_936
    hidden: int = 896


TINY = Shape(tokens=2048, vocabulary=512, hidden=64)
"""A micro-batch of the default run."""


def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute all logits at once."""
    logits = (hidden @ weight.T).float() / TEMPERATURE
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    with torch.no_grad():
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return logprobs, entropy


def checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute at most MAX_LOGITS at once, and again in the backward pass; all of them, if they are fewer."""
    chunk = MAX_LOGITS // len(weight)
    if len(hidden) <= chunk:
        return dense(hidden, weight, targets)
    parts = [
        checkpoint(dense, h, weight, t, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])  # pyright: ignore


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce chunks of logits at once, whose size the device decides on."""
    return token_logprobs(
        hidden,
        weight,
        None,
        targets,
        temperature=TEMPERATURE,
        rule=LogitRule(),
        entropy_has_gradient=False,
        max_logits=CHUNK_LOGITS["cpu"] if hidden.is_meta else None,
    )


ARMS: Mapping[str, LogprobsOf] = {"checkpointed": checkpointed, "fused": fused}


class Work:
    """Random inputs on a device, and the gradient of the logprobs."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype):
        random = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(shape.tokens, shape.hidden, generator=random).to(device, dtype).requires_grad_()
        if device == "meta":
            self.weight = torch.empty(shape.vocabulary, shape.hidden, device=device).requires_grad_()
        else:
            weight = torch.randn(shape.vocabulary, shape.hidden, generator=random) * 3 / shape.hidden**0.5
            self.weight = weight.to(device, dtype).requires_grad_()
        self._targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=random).to(device)
        self._weights = torch.randn(shape.tokens, generator=random).to(device)

    def forward_backward(self, compute_logprobs: LogprobsOf) -> None:
        self.hidden.grad = self.weight.grad = None
        (compute_logprobs(self.hidden, self.weight, self._targets)[0] * self._weights).sum().backward()


async def measure_logprobs(shape: Shape, tiny_shape: Shape, repeats: int) -> dict[str, float]:
    """Show a table. Returns the figures of the last line."""
    tiny, _ = await time_logprobs(tiny_shape, 3 * repeats, times=20)
    large, gap = await time_logprobs(shape, repeats)
    gigabytes = {name: peak_bytes(shape, arm) / 1e9 for name, arm in [("dense", dense), *ARMS.items()]}
    figures = {
        **{f"logprobs_seconds_{name}": large.median("seconds", name) for name in ARMS},
        **{f"logprobs_gb_{name}": peak for name, peak in gigabytes.items()},
        "logprobs_speedup": large.ratio("seconds", "checkpointed", over="fused"),
        "logprobs_speedup_tiny": tiny.ratio("seconds", "checkpointed", over="fused"),
        "logprobs_memory_over_dense": gigabytes["fused"] / gigabytes["dense"],
        "logprobs_difference_ppm": 1e6 * gap,
    }
    title = f"logprobs of {shape.tokens} tokens, vocabulary {shape.vocabulary}, hidden {shape.hidden}"
    show_figures(title, figures)
    return figures


async def time_logprobs(
    shape: Shape, repeats: int, *, times: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Runs, float]:
    """Return the seconds of each arm, on a GPU its peak of memory too, and how far apart their gradients are."""
    work, gradients, on_gpu = Work(shape, device, dtype), dict[str, Tensor](), device == "cuda"

    def run(name: str, repetition: int) -> Figures:
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        for _ in range(times):
            work.forward_backward(ARMS[name])
        if on_gpu:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / times
        assert work.hidden.grad is not None and work.weight.grad is not None
        gradients[name] = torch.cat([work.hidden.grad, work.weight.grad[::97]]).float()
        return {"seconds": seconds, **({"gb": torch.cuda.max_memory_allocated() / 1e9} if on_gpu else {})}

    runs = await take_turns(run, list(ARMS), repeats, warm_ups=1)
    return runs, relative_gap(gradients["fused"], gradients["checkpointed"])


def relative_gap(values: Tensor, expected: Tensor) -> float:
    return ((values - expected).norm() / expected.norm()).item()


def peak_bytes(shape: Shape, compute_logprobs: LogprobsOf) -> int:
    """Count the bytes of forward and backward, the gradients included, with tensors that have no memory."""
    work = Work(shape, "meta", torch.float32)
    with Memory() as memory:
        work.forward_backward(compute_logprobs)
    return memory.peak


# -- packing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingShape:
    """The sequences that are trained, and the model."""

    sequences: int = 32
    response: int = 128
    """The tokens of the median response; lengths are log-normal."""
    longest: int = 1024
    tokens_per_micro_batch: int = 2048
    hidden: int = 256
    layers: int = 3


async def measure_packing(shape: PackingShape, repeats: int) -> dict[str, float]:
    """Show a table. Returns the figures of the last line."""
    size = ModelSize(hidden_size=shape.hidden, num_layers=shape.layers)
    policy = Policy(build_model(VOCAB_SIZE, seed=0, size=size), temperature=1.0)
    # Groups of a single response each, so that nothing is shared.
    drawn = np.random.default_rng(0).normal(np.log(shape.response), SPREAD, shape.sequences)
    lengths = np.exp(drawn).astype(int).clip(2, shape.longest)
    groups = [make_group(ordinal, PROMPT, length, 1) for ordinal, length in enumerate(lengths.tolist())]

    def train(name: str, repetition: int) -> Figures:
        """Compute the gradient of the sum of all logprobs, which is thrown away."""
        batches = micro_batches[name]
        started = time.process_time()
        for batch in batches:
            policy(batch, CPU)[0].sum().backward()
        seconds = time.process_time() - started
        policy.zero_grad()
        padding_share = 1 - num_tokens / sum(batch.input_ids.size for batch in batches)
        return {"tokens_per_s": num_tokens / seconds, "padding_share": padding_share, "batches": len(batches)}

    micro_batches = {
        layout.value: assemble(
            groups,
            sampled_tokens(groups, 0),
            layout=layout,
            num_ranks=1,
            tokens_per_micro_batch=shape.tokens_per_micro_batch,
            keep_idle=True,
        ).micro_batches[0]
        for layout in (Layout.packed, Layout.rows)
    }
    num_tokens = sum(batch.input_ids.size for batch in micro_batches["packed"])  # which have no padding
    runs = await take_turns(train, list(micro_batches), repeats, warm_ups=1)
    runs.show(
        f"{num_tokens} tokens in {shape.sequences} sequences",
        {"tokens_per_s": ".0f", "padding_share": ".1%", "batches": "g"},
    )
    figures = {
        f"packing_{name}_{arm}": runs.median(name, arm)
        for name in ("tokens_per_s", "padding_share")
        for arm in micro_batches
    }
    return figures | {"packing_speedup": runs.ratio("tokens_per_s", "packed", over="rows")}


if __name__ == "__main__":
    main()
