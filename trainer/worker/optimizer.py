"""The optimizer of a sharded module, and its learning rate."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from configs.schema import TrainerConfig
from configs.trainer import LearningRateSchedule


class Optimizer:
    """AdamW with a schedule of the learning rate and clipping of the global gradient norm."""

    def __init__(self, module: nn.Module, lr: float, trainer: TrainerConfig):
        self._parameters = list(module.parameters())
        self._lr = lr
        self._trainer = trainer
        self.adamw = torch.optim.AdamW(
            self._parameters,
            lr=lr,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            weight_decay=trainer.weight_decay,
            fused=True,
        )

    def clip(self) -> float:
        """Clip the gradient. Return its norm before, which may be NaN or infinite."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._trainer.max_grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return norm.item()

    def step(self, place: int) -> None:
        """Step with the learning rate of the run's optimizer step `place`, counted from 0."""
        lr = self._lr * lr_factor(place, self._trainer)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return self.adamw.param_groups[0]["lr"]

    @property
    def num_steps(self) -> int:
        """Steps taken, those before a checkpoint that was loaded included."""
        counts = [state["step"] for state in self.adamw.state.values()]
        return int(torch.stack(counts).max().item()) if counts else 0


def lr_factor(place: int, trainer: TrainerConfig) -> float:
    """Return the share of the learning rate with which the run's optimizer step `place`, counted from 0, is taken.

    It needs no state: the place follows from the number of steps, which a checkpoint has. Of n steps of warm-up, the
    first takes 1 / n, the last 1. After them, a schedule falls from 1 as verl's and TRL's do: of the T steps of the
    run, the step T, which none is, would take min_lr_ratio.
    """
    warmup, total = trainer.num_warmup_steps, trainer.total_optimizer_steps
    if place < warmup:
        return (place + 1) / warmup
    progress = min(1.0, (place - warmup) / max(1, total - warmup))
    match trainer.lr_schedule:
        case LearningRateSchedule.constant:
            return 1.0
        case LearningRateSchedule.linear:
            share = 1 - progress
        case LearningRateSchedule.cosine:
            share = (1 + math.cos(math.pi * progress)) / 2
    return trainer.min_lr_ratio + (1 - trainer.min_lr_ratio) * share
