"""A second set of a model's parameters, laid out as the model's own: new weights are loaded there while it computes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Shadow:
    """`load` fills it, by the model's own loading code, which fuses, shards and ties; `swap_in` copies it over."""

    def __init__(self, model: nn.Module, device: torch.device):
        """Starts as a copy of the model's parameters, on `device`. With host memory for a GPU the copy is pinned."""
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: dict[int, nn.Parameter] = {}
        self._pin = device.type == "cpu" and any(p.device.type == "cuda" for p in model.parameters())
        self._device = device
        self.model = self._mirror(model, {})

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._pairs)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hugging Face names and layouts. The live parameters do not change."""
        self.model.load_weights(tensors)  # pyright: ignore[reportCallIssue]

    def swap_in(self) -> None:
        """Over the live parameters, in place, so that captured graphs and ties stay valid."""
        for live, copy in self._pairs:
            live.copy_(copy, non_blocking=True)

    def _mirror(self, module: nn.Module, seen: dict[int, nn.Module]) -> nn.Module:
        """The module tree again, sharing everything with the original but the parameters."""
        if id(module) in seen:
            return seen[id(module)]
        mirror: Any = module.__class__.__new__(module.__class__)
        seen[id(module)] = mirror
        mirror.__dict__.update(module.__dict__)
        mirror.__dict__["_parameters"] = {
            name: None if parameter is None else self._copy(parameter) for name, parameter in module._parameters.items()
        }
        mirror.__dict__["_modules"] = {
            name: None if child is None else self._mirror(child, seen) for name, child in module._modules.items()
        }
        return mirror

    def _copy(self, parameter: nn.Parameter) -> nn.Parameter:
        """Of the same class and with the same attributes, where vLLM keeps its loaders. A tied one is copied once."""
        if id(parameter) not in self._copies:
            data = torch.empty_like(parameter.data, device=self._device, pin_memory=self._pin).copy_(parameter.data)
            copy: Any = torch.Tensor._make_subclass(type(parameter), data, False)  # pyright: ignore
            copy.__dict__.update(parameter.__dict__)
            self._copies[id(parameter)] = copy
            self._pairs.append((parameter.data, copy.data))
        return self._copies[id(parameter)]
