"""Logprobs of hidden states on one GPU: made of chunks of logits in one pass, against logits in checkpointed chunks."""

import time
from dataclasses import replace
from statistics import median

import torch

from scripts.bench.gpu.outcome import Setting
from scripts.bench.trainer.logprobs import TEMPERATURE, LogprobsOf, Shape, Work, checkpointed
from trainer.worker.token_logprobs import LogitRule, token_logprobs

LARGE, SMALL = Shape(tokens=16_384, vocabulary=151_936, hidden=1536), Shape(tokens=64, vocabulary=512, hidden=32)
REPEATS = 5


def fused(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Policy` calls it: the device decides on the size of chunks."""
    rule = LogitRule()
    return token_logprobs(hidden, weight, None, targets, temperature=TEMPERATURE, rule=rule, entropy_has_gradient=False)


ARMS: dict[str, LogprobsOf] = {"checkpointed": checkpointed, "fused": fused}


def measure_logprobs(setting: Setting) -> dict[str, float]:
    """Seconds and bytes of forward and backward of each, the two by turns, and how much the gradients differ."""
    dtype = torch.float32 if setting.dry_run else torch.bfloat16
    work = _cast(Work.of(SMALL if setting.dry_run else LARGE, setting.device), dtype)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    gigabytes: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(1 + REPEATS):
        for name, arm in ARMS.items():
            seconds[name].append(_timed(work, arm, setting.device))
            assert work.hidden.grad is not None
            gradients[name] = work.hidden.grad.float()
            if setting.device == "cuda":
                gigabytes[f"gb_{name}"] = torch.cuda.max_memory_allocated() / 1e9
    found = {name: median(times[1:]) for name, times in seconds.items()}
    gap = (gradients["fused"] - gradients["checkpointed"]).norm() / gradients["checkpointed"].norm()
    return {
        **{f"seconds_{name}": value for name, value in found.items()},
        **gigabytes,
        "speedup": found["checkpointed"] / found["fused"],
        "gradient_gap": gap.item(),
    }


def _cast(work: Work, dtype: torch.dtype) -> Work:
    hidden, weight = (one.detach().to(dtype).requires_grad_() for one in (work.hidden, work.weight))
    return replace(work, hidden=hidden, weight=weight.detach().to(work.hidden.device).requires_grad_())


def _timed(work: Work, arm: LogprobsOf, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    work.forward_backward(arm)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
