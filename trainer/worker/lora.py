"""Low-rank adapters (LoRA, arXiv:2106.09685): a layer computes W x + (alpha / rank) B A x, and A and B are trained.

W, and all that has no adapter, is frozen and kept in the compute dtype. A and B are float32 masters. B starts at 0, so
the first policy is the model as it was loaded; with the adapters off, it stays that for good.

The experts of a mixture are stacked: each of their weights [E, m, n] has an A [E, rank, n] and a B [E, m, rank]. Their
forward is the model's own, over W + (alpha / rank) B A, which is made anew each time.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.model import ALL_LINEAR, LoraConfig
from configs.validate import ConfigError
from trainer.worker.expert_parallel import stacked_experts
from trainer.worker.loading import local, local_rows
from weight_sync.adapter import OF_EXPERTS, merged


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. It takes over the layer's parameters, under the names that they have.

    Its factors have no values yet: `draw_factors` gives them their first ones.

    Example: LoraLinear(linear, rank=8, scale=4.0, dropout=0.0)
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dropout: float):
        nn.Module.__init__(self)  # that of nn.Linear would make another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_A = _factor(torch.empty(rank, linear.in_features, device=device))
        self.lora_B = _factor(torch.empty(linear.out_features, rank, device=device))
        self.scale = scale
        self.dropout = dropout
        self.is_on = True

    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight, self.bias)
        if not self.is_on:
            return output
        kept = F.dropout(input, self.dropout, training=self.dropout > 0 and torch.is_grad_enabled())
        return output + self.lora_B(self.lora_A(kept)) * self.scale


def _factor(values: Tensor) -> nn.Linear:
    """Return the layer with this weight [out, in]. `skip_init` cannot make it of the fake tensors of a rehearsal."""
    with torch.device("meta"):
        layer = nn.Linear(values.shape[1], values.shape[0], bias=False)
    layer.weight = nn.Parameter(values)
    return layer


class _Factor(nn.Module):
    def __init__(self, values: Tensor):
        super().__init__()
        self.weight = nn.Parameter(values)


class StackedAdapter(nn.Module):
    """The factors of one weight of stacked experts, without values."""

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        experts, rows, columns = weight.shape
        self.lora_A = _Factor(weight.new_empty(experts, rank, columns, dtype=torch.float32))
        self.lora_B = _Factor(weight.new_empty(experts, rows, rank, dtype=torch.float32))
        self.is_on = True


class AdaptedExperts:
    """Computes stacked experts with their adapters, and takes the place of their forward."""

    def __init__(self, experts: Any, names: list[str], rank: int, scale: float):
        """Put an adapter beside each weight of `names`."""
        self._experts, self._scale = experts, scale
        self._plain = copy.copy(experts)  # the same forward, with other tensors for every call
        self._plain._parameters, self._plain._modules = dict(experts._parameters), dict(experts._modules)
        adapters = {name: StackedAdapter(experts.get_parameter(name), rank) for name in names}
        experts.add_module(OF_EXPERTS, nn.ModuleDict(adapters))

    def __call__(self, *args: Any, **options: Any) -> Any:
        weights = dict(self._experts.named_parameters(recurse=False))
        for name, adapter in self._experts.get_submodule(OF_EXPERTS).items():
            if adapter.is_on:
                factors = adapter.lora_A.weight, adapter.lora_B.weight
                weights[name] = merged(weights[name], *factors, self._scale)
        return torch.func.functional_call(self._plain, weights, args, options)


def add_adapters(causal_lm: Any, lora: LoraConfig, compute_dtype: torch.dtype) -> None:
    """Freeze the model in the compute dtype, and put adapters beside its target layers.

    Raises:
        ConfigError: the targets are none of the model's layers, or one shares its weight with another module.
    """
    assert lora.rank is not None
    layers, scale = target_layers(causal_lm, lora.targets), lora.alpha / lora.rank
    experts = {name: weights for name, weights in _expert_weights(causal_lm).items() if _chosen(weights, lora.targets)}
    freeze(causal_lm, compute_dtype)
    for name, linear in layers.items():
        causal_lm.set_submodule(name, LoraLinear(linear, lora.rank, scale, lora.dropout))
    for name, weights in experts.items():
        module, names = causal_lm.get_submodule(name), _chosen(weights, lora.targets)
        module.forward = AdaptedExperts(module, names, lora.rank, scale)


def freeze(module: nn.Module, dtype: torch.dtype) -> None:
    """Train nothing of the module, and keep it in `dtype`."""
    module.requires_grad_(False)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def draw_factors(module: nn.Module, seed: int) -> None:
    """Give adapters, sharded or not, their first values. `seed` decides every A, whatever the number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for layer in _adapted(module):
        a = torch.empty(layer.lora_A.weight.shape)
        # As PEFT does, and nn.Linear. The rows of all experts are drawn as those of one matrix.
        nn.init.kaiming_uniform_(a.flatten(0, -2), a=math.sqrt(5), generator=generator)
        local(layer.lora_A.weight).copy_(a[local_rows(layer.lora_A.weight)])
        local(layer.lora_B.weight).zero_()


def _adapted(module: nn.Module) -> list[LoraLinear | StackedAdapter]:
    return [layer for layer in module.modules() if isinstance(layer, LoraLinear | StackedAdapter)]


def target_layers(causal_lm: Any, targets: list[str]) -> dict[str, nn.Linear]:
    """The layers with an adapter by name, in the model's order. Raises as `add_adapters` does."""
    head = causal_lm.get_output_embeddings()
    linear = {name: module for name, module in causal_lm.named_modules() if type(module) is nn.Linear}
    stacked = _expert_weights(causal_lm)
    if targets == [ALL_LINEAR]:
        chosen = {name: module for name, module in linear.items() if module is not head}
        unknown = [] if chosen else targets
    else:
        chosen = {
            name: module for name, module in linear.items() if any(_is_called(name, target) for target in targets)
        }
        unknown = [
            target
            for target in targets
            if not any(_is_called(name, target) for name in linear)
            and not any(_chosen(weights, [target]) for weights in stacked.values())
        ]
    key, architecture = f"model.lora.targets=[{','.join(targets)}]", type(causal_lm).__name__
    if unknown:
        names = {name.rpartition(".")[2] for name in [*linear, *stacked]}
        there_are = ", ".join(sorted(names)) or "none"
        raise ConfigError(f"{key}: {architecture} has no linear layer {unknown[0]}; there are {there_are}")
    owners = Counter(parameter for _, parameter in causal_lm.named_parameters(remove_duplicate=False))
    for name, module in chosen.items():
        if owners[module.weight] > 1:
            what = "shares its weight with another module, as the head does with tied embeddings"
            raise ConfigError(f"{key}: {name} of {architecture} {what}: it cannot have an adapter")
    return chosen


def _expert_weights(causal_lm: nn.Module) -> dict[str, dict[str, str]]:
    """Return the names of the weights of stacked experts, without biases, by the names of their modules: that in the
    model -> that in the module."""
    return {
        name: {f"{name}.{own}": own for own, weight in experts.named_parameters(recurse=False) if weight.dim() == 3}
        for name, experts in stacked_experts(causal_lm)
    }


def _chosen(weights: dict[str, str], targets: list[str]) -> list[str]:
    """Return the weights of a module of `_expert_weights` that a target names: by the end of the module's name, or,
    with a dot, by the end of the weight's. `all_linear` names none."""
    return [
        own
        for name, own in weights.items()
        if any(
            _is_called(name.removesuffix(f".{own}"), target) or ("." in target and _is_called(name, target))
            for target in targets
        )
    ]


def _is_called(name: str, target: str) -> bool:
    """Return whether a target names the module, as PEFT matches: by its whole name, or the end of it."""
    return name == target or name.endswith(f".{target}")


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Let the module compute as without adapters inside the `with` block, if it has any."""
    layers = _adapted(module)
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True
