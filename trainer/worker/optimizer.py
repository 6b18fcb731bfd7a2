"""The optimizer of a sharded module, with its moments on the device or in host memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from configs.schema import TrainerConfig
from configs.trainer import ADAM_BETAS
from trainer.learning_rate import lr_factor

MOMENTS = ("exp_avg", "exp_avg_sq")


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
            betas=ADAM_BETAS,
            weight_decay=trainer.weight_decay,
            fused=True,  # one kernel for all parameters
        )

    def clip(self) -> float:
        """Clip the gradient. Return its norm before, which may be NaN or infinite."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._trainer.max_grad_norm)
        if isinstance(norm, DTensor):  # the norm of this rank's shards; full_tensor() adds up those of all ranks
            norm = norm.full_tensor()
        return norm.item()

    def step(self, place: int, factor: float = 1.0) -> None:
        """Step with `factor` times the learning rate of the run's optimizer step `place`, counted from 0."""
        lr = self._lr * lr_factor(place, self._trainer) * factor
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


class HostAdamW(torch.optim.AdamW):
    """A step copies the moments of one parameter to its device, updates both there and copies the moments back: the
    arithmetic is that of the fused AdamW. The state is saved and loaded as that of any AdamW."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # moments are on their way to the host, where a checkpoint reads them

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
        there = {name: torch.empty_like(parameter).copy_(state[name], non_blocking=True) for name in MOMENTS}
        adamw(
            [parameter],
            [parameter.grad],  # pyright: ignore
            [there["exp_avg"]],
            [there["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name in MOMENTS:
            state[name].copy_(there[name], non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state. torch's own would copy all moments to the devices of their parameters."""
        states = state_dict["state"]
        rest = {key: {name: state[name] for name in state.keys() - set(MOMENTS)} for key, state in states.items()}
        super().load_state_dict({**state_dict, "state": rest})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if key in states:
                self.state[parameter] |= {name: states[key][name] for name in MOMENTS}
