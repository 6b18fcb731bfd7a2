"""Low-rank adapters (LoRA, arXiv:2106.09685): a layer computes W x + (alpha / rank) B A x, and A and B are trained.

W, and all that has no adapter, is frozen and kept in the compute dtype. A and B are float32 masters. B starts at 0, so
the first policy is the model as it was loaded; with the adapters off, it stays that for good.
"""

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
from trainer.worker.loading import local, local_rows


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
    """Return the layer with this weight [out, in]."""
    with torch.device("meta"):
        layer = nn.Linear(values.shape[1], values.shape[0], bias=False)
    layer.weight = nn.Parameter(values)
    return layer


def add_adapters(causal_lm: Any, lora: LoraConfig, compute_dtype: torch.dtype) -> None:
    """Freeze the model in the compute dtype, and put adapters beside its target layers.

    Raises:
        ConfigError: the targets are none of the model's layers, or one shares its weight with another module.
    """
    assert lora.rank is not None
    layers = target_layers(causal_lm, lora.targets)
    freeze(causal_lm, compute_dtype)
    for name, linear in layers.items():
        causal_lm.set_submodule(name, LoraLinear(linear, lora.rank, lora.alpha / lora.rank, lora.dropout))


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
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)  # as PEFT does, and nn.Linear
        local(layer.lora_A.weight).copy_(a[local_rows(layer.lora_A.weight)])
        local(layer.lora_B.weight).zero_()


def _adapted(module: nn.Module) -> list[LoraLinear]:
    return [layer for layer in module.modules() if isinstance(layer, LoraLinear)]


def target_layers(causal_lm: Any, targets: list[str]) -> dict[str, nn.Linear]:
    """The layers with an adapter by name, in the model's order. Raises as `add_adapters` does."""
    head = causal_lm.get_output_embeddings()
    linear = {name: module for name, module in causal_lm.named_modules() if type(module) is nn.Linear}
    if targets == [ALL_LINEAR]:
        chosen = {name: module for name, module in linear.items() if module is not head}
        unknown = [] if chosen else targets
    else:
        chosen = {
            name: module for name, module in linear.items() if any(_is_called(name, target) for target in targets)
        }
        unknown = [target for target in targets if not any(_is_called(name, target) for name in linear)]
    key, architecture = f"model.lora.targets=[{','.join(targets)}]", type(causal_lm).__name__
    if unknown:
        there_are = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        raise ConfigError(f"{key}: {architecture} has no linear layer {unknown[0]}; there are {there_are}")
    owners = Counter(parameter for _, parameter in causal_lm.named_parameters(remove_duplicate=False))
    for name, module in chosen.items():
        if owners[module.weight] > 1:
            what = "shares its weight with another module, as the head does with tied embeddings"
            raise ConfigError(f"{key}: {name} of {architecture} {what}: it cannot have an adapter")
    return chosen


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
