"""The second set of parameters, on a model that loads as vLLM's do: fused, sharded and tied parameters with loaders."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from weight_sync.receiver.shadow import Shadow

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
        """gate and up, one below the other, in one parameter. Bound to the live module, as vLLM's loaders are."""
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


def loaded(seed: int) -> Model:
    """What loading straight into a model gives."""
    model = Model()
    model.load_weights(checkpoint(seed).items())
    return model


def values(model: nn.Module) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


IDS = torch.tensor([0, 3, 4])
NUM_TENSORS = 7


def test_loading_changes_nothing_that_is_live_and_swapping_in_changes_everything() -> None:
    model = loaded(1)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    before, logits = values(model), model(IDS)
    shadow = Shadow(model, CPU)
    for seed in (2, 3):
        shadow.load(checkpoint(seed).items(), NUM_TENSORS)
        assert_equal(values(model), before)
        assert torch.equal(model(IDS), logits)
    for seed in (3, 4):
        shadow.load(checkpoint(seed).items(), NUM_TENSORS)
        shadow.swap_in()
        assert_equal(values(model), values(loaded(seed)))
        assert torch.equal(model(IDS), loaded(seed)(IDS)) and not torch.equal(model(IDS), logits)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places, "in place"


def test_it_starts_as_a_copy_so_that_what_is_not_loaded_stays() -> None:
    model = loaded(1)
    shadow = Shadow(model, CPU)
    shadow.load([("layers.1.up", checkpoint(2)["layers.1.up"])], NUM_TENSORS)
    shadow.swap_in()
    expected = values(loaded(1))
    expected["layers.1.gate_up"][2:] = checkpoint(2)["layers.1.up"]
    assert_equal(values(model), expected)


def test_parameters_keep_their_class_attributes_and_ties_and_share_no_memory_with_the_live_ones() -> None:
    model = loaded(1)
    mirror: Any = Shadow(model, CPU).model
    assert type(mirror) is Model and mirror.embed is mirror.head.weight and mirror.again is mirror.layers[0]
    assert [name for name, _ in mirror.named_parameters()] == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        copy = mirror.get_parameter(name)
        assert type(copy) is LoadedParameter and copy.__dict__ == parameter.__dict__
        assert copy.data_ptr() != parameter.data_ptr() and not copy.requires_grad
    assert mirror.layers[0].bias is None and mirror.absent is None
    assert mirror.positions is model.positions and mirror.num_loads is model.num_loads, "all else is shared"


def test_weights_that_do_not_fit_raise_and_leave_the_live_ones_as_they_are() -> None:
    model = loaded(1)
    shadow = Shadow(model, CPU)
    with pytest.raises(RuntimeError):
        shadow.load([("embed", torch.ones(5, 3)), ("layers.0.gate", torch.zeros(7, 3))], NUM_TENSORS)
    assert_equal(values(model), values(loaded(1)))


def test_a_loader_that_passes_a_parameter_over_is_an_error_that_names_it() -> None:
    model = loaded(1)
    shadow = Shadow(model, CPU)
    shadow.model.passed_over = "layers.1.down"
    with pytest.raises(RuntimeError, match=r"^Model.load_weights left out layers.1.down$"):
        shadow.load(checkpoint(2).items(), NUM_TENSORS)


def test_a_model_whose_parameters_were_replaced_is_not_updated_beside_itself() -> None:
    model = loaded(1)
    shadow = Shadow(model, CPU)
    model.layers[0].down = LoadedParameter(torch.zeros(3, 2), weight_loader=load_shard, rank=1)
    with pytest.raises(RuntimeError, match="have been replaced"):
        shadow.load(checkpoint(2).items(), NUM_TENSORS)


def test_a_parameter_that_has_moved_is_written_where_it_is() -> None:
    model = loaded(1)
    shadow = Shadow(model, CPU)
    model.embed.data = model.embed.data.clone()
    shadow.load(checkpoint(2).items(), NUM_TENSORS)
    shadow.swap_in()
    assert_equal(values(model), values(loaded(2)))
