"""AdamW whose moments stay in host memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


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
        """torch's own would copy all moments to the devices of their parameters."""
        states = state_dict["state"]
        others = {key: {name: state[name] for name in state.keys() - set(MOMENTS)} for key, state in states.items()}
        super().load_state_dict({**state_dict, "state": others})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if key in states:
                self.state[parameter] |= {name: states[key][name] for name in MOMENTS}
