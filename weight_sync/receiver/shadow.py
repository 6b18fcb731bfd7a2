"""A second set of a model's parameters, laid out as the model's own: new weights are loaded there while it computes."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


def load_weights(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], num_tensors: int) -> None:
    """Loads by the model's own code. `num_tensors` make a whole model; a delta has fewer. RuntimeError when, of a whole
    model, the code left out parameters that came under their own names (not fused from several)."""
    came: set[str] = set()

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            came.add(name)
            yield name, tensor

    loaded: set[str] | None = model.load_weights(noted())  # pyright: ignore[reportCallIssue, reportAssignmentType]
    if loaded is not None and len(came) == num_tensors:
        left_out = came.intersection(name for name, _ in model.named_parameters()) - loaded
        if left_out:
            raise RuntimeError(f"{type(model).__name__}.load_weights left out {', '.join(sorted(left_out))}")


class Shadow:
    """`load` fills it, by the model's own loading code, which fuses, shards and ties; `swap_in` makes it live."""

    def __init__(self, model: nn.Module, device: torch.device):
        """Starts as a copy of the model's parameters, on `device`. With host memory for a GPU the copy is pinned."""
        self._live = model
        self._pairs: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._copies: dict[int, nn.Parameter] = {}
        self._pin = device.type == "cpu" and any(p.device.type == "cuda" for p in model.parameters())
        self._device = device
        self.model = self._mirror(model, {})

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], num_tensors: int) -> None:
        """As `load_weights`; the live parameters do not change. RuntimeError also when the model has others by now."""
        load_weights(self.model, tensors, num_tensors)
        if {id(parameter) for parameter in self._live.parameters()} != self._copies.keys():
            raise RuntimeError("the model's parameters have been replaced since the first update")

    def swap_in(self) -> None:
        """Copies over the live parameters, in place, so that captured graphs and ties stay valid."""
        for live, copy in self._pairs:
            live.data.copy_(copy, non_blocking=True)

    def _mirror(self, module: nn.Module, seen: dict[int, nn.Module]) -> nn.Module:
        """A module tree that shares everything with the original but the parameters."""
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
        """Keeps the class and the attributes, where vLLM keeps its loaders. A tied parameter is copied once."""
        if id(parameter) not in self._copies:
            data = torch.empty_like(parameter.data, device=self._device, pin_memory=self._pin).copy_(parameter.data)
            copy: Any = torch.Tensor._make_subclass(type(parameter), data, False)  # pyright: ignore
            copy.__dict__.update(parameter.__dict__)
            self._copies[id(parameter)] = copy
            self._pairs.append((parameter, copy.data))
        return self._copies[id(parameter)]
