"""The optimizer of a sharded module."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from configs.schema import TrainerConfig


class Optimizer:
    """AdamW with linear warm-up of the learning rate and clipping of the global gradient norm."""

    def __init__(self, module: nn.Module, lr: float, trainer: TrainerConfig):
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
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

    def step(self, global_steps: int) -> None:
        """Step with the learning rate of `global_steps`."""
        lr = self._lr * min(1.0, (global_steps + 1) / max(1, self._trainer.lr_warmup_steps))
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return self.adamw.param_groups[0]["lr"]
