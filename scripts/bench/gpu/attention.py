"""The trainer's attention on one GPU: flex and varlen against dense, in prefix trees and in sequences end to end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from configs.schema import AttentionKind, Layout
from scripts.bench import tree
from scripts.bench.common import write_line
from scripts.bench.gpu.models import build, shape_of
from scripts.bench.gpu.outcome import Setting
from trainer.batch import MicroBatch, assemble
from trainer.tokens import sampled_tokens
from trainer.worker.attention.attention import Attention
from trainer.worker.model import Policy

SESSIONS = tree.Shape(turns=8, group_size=8, turn_tokens=64)
"""Of 2,048 tokens each, three quarters of them a prompt that all have."""
SMALL = tree.Shape(turns=2, group_size=2)
KINDS = {
    Layout.tree: (AttentionKind.dense, AttentionKind.flex),
    Layout.packed: (AttentionKind.dense, AttentionKind.flex, AttentionKind.varlen),
}
WARM_UPS, REPEATS = 2, 5
TOLERANCE = 0.05
"""Largest mean difference of logprobs, as a share of their standard deviation, as in trainer/worker/parity.py."""


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float
    """Of forward and backward."""
    logprobs: Tensor
    gradient: Tensor
    """Of the embedding, which all layers lie before."""


def measure_attention(shape_name: str, setting: Setting) -> dict[str, float]:
    """Milliseconds, speed over dense, and differences. Raises RuntimeError where logprobs are not those of dense."""
    sessions = SMALL if setting.dry_run else SESSIONS
    dtype = torch.float32 if setting.dry_run else torch.bfloat16
    causal_lm = build(shape_of(shape_name, setting), setting.device, dtype)
    figures: dict[str, float] = {}
    for layout, kinds in KINDS.items():
        batch = micro_batch(sessions, layout)
        figures[f"{layout.value}_tokens"] = float(batch.input_ids.size)
        expected: Outcome | None = None
        for kind in kinds:
            if kind is AttentionKind.flex and setting.dry_run:  # without gradients on a CPU
                continue
            policy = Policy(causal_lm, temperature=1.0, attention=Attention(kind, setting.device))
            found = _run(policy, batch, setting.device)
            expected = expected or found
            of_kind = compared(found, expected)
            write_line(f"{layout.value}, {kind.value}: {of_kind}")
            figures |= {f"{layout.value}_{kind.value}_{name}": value for name, value in of_kind.items()}
    return figures


def compared(found: Outcome, dense: Outcome) -> dict[str, float]:
    gap = (found.logprobs - dense.logprobs).abs().mean().item()
    if not gap <= TOLERANCE * dense.logprobs.std().item():
        raise RuntimeError(f"logprobs differ from those of dense attention by {gap:.3g} nats a token")
    return {
        "ms": 1e3 * found.seconds,
        "over_dense": dense.seconds / found.seconds,
        "logprob_gap": gap,
        "gradient_gap": ((found.gradient - dense.gradient).norm() / dense.gradient.norm()).item(),
    }


def micro_batch(sessions: tree.Shape, layout: Layout) -> MicroBatch:
    """A group of sessions without branches in one row."""
    groups: Sequence = [tree.make_group(sessions, "linear")]
    tokens = sampled_tokens(groups, 0)
    step = assemble(groups, tokens, layout=layout, num_ranks=1, tokens_per_micro_batch=2**20, keep_idle=True)
    return step.micro_batches[0][0]


def _run(policy: Policy, batch: MicroBatch, device: str) -> Outcome:
    seconds: list[float] = []
    embedding = policy.causal_lm.get_input_embeddings().weight
    for _ in range(WARM_UPS + REPEATS):
        policy.zero_grad()
        started = time.perf_counter()
        logprobs, _ = policy(batch, torch.device(device))
        logprobs.mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return Outcome(median(seconds[WARM_UPS:]), logprobs.detach(), embedding.grad.float().clone())
