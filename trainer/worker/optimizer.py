"""The optimizer of a sharded module."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from configs.schema import TrainerConfig
from trainer.learning_rate import lr_factor
from trainer.worker.host_adamw import HostAdamW


class Optimizer:
    """AdamW with a schedule of the learning rate and clipping of the global gradient norm."""

    def __init__(self, module: nn.Module, lr: float, trainer: TrainerConfig):
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._lr = lr
        self._trainer = trainer
        kind = HostAdamW if trainer.optimizer_on_host else torch.optim.AdamW
        self.adamw = kind(
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
