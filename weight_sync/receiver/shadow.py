"""A second set of a model's parameters, laid out as the model's own: new weights are loaded there while it computes."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weight_sync.receiver.host_memory import HostMemory
from weight_sync.receiver.samples import differing, sampled, shortened

Named = Iterable[tuple[str, torch.Tensor]]
Rename = Callable[[Named], Named]
"""Gives published tensors the names that the model's loading code knows."""
Finish = Callable[[nn.Module], None]
"""Computes, in place, the parameters that no loader writes, from those that have been loaded."""


@dataclass(frozen=True, slots=True)
class LoadForms:
    """Layers that compute with other parameters than loaders write, because they quantize them."""

    loaded: Callable[[nn.Module], dict[str, nn.Parameter] | None] = lambda module: None
    """Returns the parameters that loaders write, maybe on the meta device; None where a layer computes with them."""
    computed: Callable[[nn.Module], dict[str, torch.Tensor]] = lambda module: {}
    """Returns the parameters that such a layer computes with, from those that have been loaded."""


PLAIN = LoadForms()


def nothing_else(model: nn.Module) -> None:
    """Leave the model as it was loaded."""


def load_weights(
    model: nn.Module, tensors: Named, num_tensors: int, rename: Rename = iter, finish: Finish = nothing_else
) -> bool:
    """Loads by the model's own code, and returns whether a whole model came. `num_tensors` make one; a delta has fewer.
    RuntimeError when the code knows no such name, and when, of a whole model, it left out parameters that came under
    their own names (not fused from several)."""
    came: set[str] = set()
    latest = ""

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal latest
        for name, tensor in tensors:
            came.add(name)
            latest = name
            yield name, tensor

    try:
        loaded: set[str] | None = model.load_weights(rename(noted()))  # pyright: ignore
    except (AttributeError, KeyError, ValueError) as error:  # which of them, each model decides for itself
        what = f"{type(model).__name__}.load_weights cannot take {latest}"
        raise RuntimeError(f"{what}, as the trainer publishes it: {type(error).__name__}: {error}") from error
    is_whole = len(came) == num_tensors
    if loaded is not None and is_whole:
        left_out = came.intersection(name for name, _ in model.named_parameters()) - loaded
        if left_out:
            raise RuntimeError(f"{type(model).__name__}.load_weights left out {', '.join(sorted(left_out))}")
    finish(model)
    return is_whole


class Shadow:
    """`load` fills it, by the model's own loading code, which fuses, shards and ties; `swap_in` makes it live, and
    `require_live` looks whether it is.

    Every element of every parameter must be written by the first whole model that comes, so that no part of a fused
    parameter, no tied one that is not tied here, and no other is left at what the engine had loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        rename: Rename = iter,
        finish: Finish = nothing_else,
        forms: LoadForms = PLAIN,
    ):
        """Starts as a copy of the model's parameters, on `device`. With host memory for a GPU the copy is pinned."""
        self._live = model
        self._rename, self._finish, self._forms = rename, finish, forms
        self._pairs: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._loaded: list[tuple[str, torch.Tensor]] = []
        """(name, tensor) of what loaders write where the layer computes with something else."""
        self._computing: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []
        """The mirrors of these layers, and the copies of what the live ones compute with."""
        self._copies: dict[int, nn.Parameter] = {}
        self._device = device
        parameters = list(model.parameters())
        self._host_memory: HostMemory | None = None
        if device.type == "cpu":
            is_of_gpu = any(parameter.is_cuda for parameter in parameters)
            self._host_memory = HostMemory(sum(each.nbytes for each in parameters), pin=is_of_gpu)
        self.model = self._mirror(model, {})
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [names[id(live)] for live, _ in self._pairs]
        self._is_covered = False
        """A whole model has come, and has written all."""
        self._staged: list[torch.Tensor] = []
        """A sample of each parameter of the version that was loaded last."""

    def load(self, tensors: Named, num_tensors: int, constants: Collection[str] = ()) -> None:
        """Load as `load_weights` does; the live parameters do not change. RuntimeError also when the model has others
        by now, and when a whole model leaves a part of a parameter out.

        Args:
            constants: names of what the trainer's model has besides and never trains, such as the bias of a router. An
                engine may have it as a parameter, as it was loaded.
        """
        if not self._is_covered:
            self._forget()
        is_whole = load_weights(self.model, tensors, num_tensors, self._rename, self._finish)
        if {id(parameter) for parameter in self._live.parameters()} != self._copies.keys():
            raise RuntimeError("the model's parameters have been replaced since the first update")
        if not self._is_covered:
            left_out = self._fill_what_is_left(constants)
            if not is_whole:
                raise RuntimeError("the first update brings a part of the weights only")
            if left_out:
                raise RuntimeError(
                    f"{type(self._live).__name__}: no published tensor has written {shortened(left_out)}: what an "
                    "update does not reach would stay at what the engine had loaded"
                )
            self._is_covered = True
        self._compute()
        self._staged = sampled([copy for _, copy in self._pairs])

    def swap_in(self) -> None:
        """Copies over the live parameters, in place, so that captured graphs and ties stay valid."""
        for live, copy in self._pairs:
            live.data.copy_(copy, non_blocking=True)

    def require_live(self) -> None:
        """Raise RuntimeError, which names the parameters, where the live ones are not what was loaded last."""
        others = differing(self._names, sampled([live.data for live, _ in self._pairs]), self._staged)
        if others:
            raise RuntimeError(f"live are other weights than those that were staged: {shortened(others)}")

    def _forget(self) -> None:
        """Mark every element as not written, by NaN. What is no floating-point number cannot be marked."""
        for tensor in [*(copy for _, copy in self._pairs), *(tensor for _, tensor in self._loaded)]:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)

    def _fill_what_is_left(self, constants: Collection[str]) -> list[str]:
        """Give what was not written its live value. Return the parameters of which that is a part, but for what is 0:
        engines pad with it."""
        unpublished = {name.rpartition(".")[2] for name in constants}
        left_out = [name for name, tensor in self._loaded if tensor.isnan().any()]
        computed = {copy.data_ptr() for _, copies in self._computing for copy in copies.values()}
        for name, (live, copy) in zip(self._names, self._pairs, strict=True):
            if copy.data_ptr() in computed or not copy.is_floating_point() or not (unwritten := copy.isnan()).any():
                continue
            before = live.data.to(copy.device)
            share = ((before != 0) & unwritten).float().mean().item()
            if share and name.rpartition(".")[2] not in unpublished:
                left_out.append(name if share == 1 else f"{name} ({share:.0%} of it)")
            copy.copy_(torch.where(unwritten, before, copy))
        return left_out

    def _compute(self) -> None:
        """Give the layers that quantize what they will compute with. RuntimeError where that has another form now."""
        for mirror, copies in self._computing:
            made = self._forms.computed(mirror)
            form = {name: (copy.shape, copy.dtype) for name, copy in copies.items()}
            if (new := {name: (tensor.shape, tensor.dtype) for name, tensor in made.items()}) != form:
                raise RuntimeError(f"{type(mirror).__name__} makes {new} of its weights, and computes with {form}")
            for name, copy in copies.items():
                copy.data.copy_(made[name])

    def _mirror(self, module: nn.Module, seen: dict[int, nn.Module], path: str = "") -> nn.Module:
        """A module tree that shares everything with the original but the parameters."""
        if id(module) in seen:
            return seen[id(module)]
        mirror: Any = module.__class__.__new__(module.__class__)
        seen[id(module)] = mirror
        mirror.__dict__.update(module.__dict__)
        copies = {
            name: None if parameter is None else self._copy(parameter) for name, parameter in module._parameters.items()
        }
        loaded = self._forms.loaded(module)
        if loaded is not None:
            self._computing.append((mirror, {name: copy for name, copy in copies.items() if copy is not None}))
            copies = {name: self._to_load(path + name, parameter) for name, parameter in loaded.items()}
        mirror.__dict__["_parameters"] = copies
        mirror.__dict__["_modules"] = {
            name: None if child is None else self._mirror(child, seen, f"{path}{name}.")
            for name, child in module._modules.items()
        }
        return mirror

    def _to_load(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        data = torch.empty_like(parameter.data, device=self._device)
        self._loaded.append((name, data))
        return _of_class(parameter, data)

    def _copy(self, parameter: nn.Parameter) -> nn.Parameter:
        """Keeps the class and the attributes, where vLLM keeps its loaders. A tied parameter is copied once."""
        if id(parameter) not in self._copies:
            if self._host_memory is None:
                data = torch.empty_like(parameter.data, device=self._device)
            else:
                data = self._host_memory.empty_like(parameter.data)
            data.copy_(parameter.data)
            self._copies[id(parameter)] = _of_class(parameter, data)
            self._pairs.append((parameter, data))
        return self._copies[id(parameter)]


def _of_class(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter with these values, and with the class and the attributes of another."""
    copy: Any = torch.Tensor._make_subclass(type(parameter), data, False)  # pyright: ignore
    copy.__dict__.update(parameter.__dict__)
    return copy
