"""A model that loads as vLLM's do: fused, sharded and tied parameters with loaders. And checkpoints of it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


class LoadedParameter(nn.Parameter):
    """A parameter class of its own, with attributes, as vLLM has them."""

    def __new__(cls, data: torch.Tensor, **attributes: Any) -> "LoadedParameter":
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, **attributes: Any):
        self.__dict__.update(attributes)


def load_whole(parameter: nn.Parameter, loaded: torch.Tensor, shard_id: str | None = None) -> None:
    parameter.data.copy_(loaded)


def load_shard(parameter: LoadedParameter, loaded: torch.Tensor, shard_id: str | None = None) -> None:
    """This rank's columns only."""
    columns = parameter.shape[1]
    parameter.data.copy_(loaded.narrow(1, parameter.rank * columns, columns))


class Layer(nn.Module):
    def __init__(self, rank: int):
        super().__init__()
        self.gate_up = LoadedParameter(torch.zeros(4, 3), weight_loader=self.load_fused)
        self.down = LoadedParameter(torch.zeros(3, 2), weight_loader=load_shard, rank=rank)
        self.register_parameter("bias", None)

    def load_fused(self, parameter: nn.Parameter, loaded: torch.Tensor, shard_id: str) -> None:
        """Load gate and up, one below the other, into one parameter. Bound to the live module, as vLLM's loaders
        are."""
        rows = len(parameter) // 2
        parameter.data.narrow(0, {"gate": 0, "up": rows}[shard_id], rows).copy_(loaded)


class Model(nn.Module):
    """Embedding tied to the head; one layer module used twice; a buffer; a cached view's length as plain state."""

    def __init__(self, rank: int = 1, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = LoadedParameter(torch.zeros(5, 3, dtype=dtype), weight_loader=load_whole)
        self.layers = nn.ModuleList([Layer(rank), Layer(rank)])
        self.again = self.layers[0]
        self.absent = None
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed
        self.register_buffer("positions", torch.arange(5.0))
        self.num_loads = [0]
        self.passed_over = ""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed[ids]
        for layer in self.layers:
            gate, up = (hidden @ layer.gate_up.T).chunk(2, dim=-1)
            hidden = hidden + (gate * up) @ layer.down.T
        return self.head(hidden) + self.positions

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        done = set()
        for name, loaded in tensors:
            target, shard_id = name, None
            for shard in ("gate", "up"):
                if name.endswith(f".{shard}"):
                    target, shard_id = name.removesuffix(shard) + "gate_up", shard
            parameter: Any = parameters[target]
            if target == self.passed_over:
                continue
            parameter.weight_loader(parameter, loaded, shard_id)
            done.add(target)
        self.num_loads[0] += 1
        return done


def checkpoint(seed: int) -> Tensors:
    """Hugging Face names: gate and up apart, and `down` with the columns of two ranks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"embed": torch.randn(5, 3, generator=generator)}
    for layer in range(2):
        tensors |= {
            f"layers.{layer}.gate": torch.randn(2, 3, generator=generator),
            f"layers.{layer}.up": torch.randn(2, 3, generator=generator),
            f"layers.{layer}.down": torch.randn(3, 4, generator=generator),
        }
    return tensors


NUM_TENSORS = 7
"""Of a checkpoint."""
