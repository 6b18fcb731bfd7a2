"""The second set of parameters, on a model that loads as vLLM's do: fused, sharded and tied parameters with loaders."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.shadow_models import (
    CPU,
    NUM_TENSORS,
    LoadedParameter,
    Model,
    Tensors,
    checkpoint,
    load_shard,
)
from weight_sync.receiver.shadow import LoadForms, Shadow, load_weights


def loaded(seed: int) -> Model:
    """Return what loading straight into a model gives."""
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


def test_what_a_later_update_does_not_load_stays() -> None:
    model = loaded(1)
    shadow = Shadow(model, CPU)
    with pytest.raises(RuntimeError, match="^the first update brings a part of the weights only$"):
        shadow.load([("embed", checkpoint(2)["embed"])], NUM_TENSORS)
    shadow.load(checkpoint(1).items(), NUM_TENSORS)
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


class Quantizing(Model):
    """Computes with `down` of its second layer as whole numbers, and with their scale, which no loader writes."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = self.layers[1]
        self.recorded: dict[str, Any] = {"gate_up": layer.gate_up, "down": layer.down}
        layer.__dict__["_parameters"] = dict(layer._parameters)
        quantize(layer)

    def loaded(self, module: nn.Module) -> dict[str, nn.Parameter] | None:
        return self.recorded if module is self.layers[1] else None


def quantize(layer: Any) -> None:
    scale = layer.down.data.abs().max().reshape(1)
    whole = (127 * layer.down.data / scale).nan_to_num().round().to(torch.int8)
    layer.scale, layer.down = nn.Parameter(scale, requires_grad=False), nn.Parameter(whole, requires_grad=False)


def computed(module: nn.Module) -> Tensors:
    scratch = copy.copy(module)
    scratch.__dict__["_parameters"] = dict(module._parameters)
    quantize(scratch)
    return {name: made.data for name, made in scratch.named_parameters(recurse=False)}


def test_a_layer_that_quantizes_computes_with_what_it_makes_of_what_was_loaded() -> None:
    model = Quantizing()
    shadow = Shadow(model, CPU, forms=LoadForms(model.loaded, computed))
    shadow.load(checkpoint(2).items(), NUM_TENSORS)
    shadow.load([("layers.1.down", checkpoint(3)["layers.1.down"])], NUM_TENSORS)
    shadow.swap_in()
    shadow.require_live()
    expected = values(loaded(2))
    down = values(loaded(3))["layers.1.down"]
    scale = down.abs().max()
    whole = (127 * down / scale).round().to(torch.int8)
    assert_equal(values(model), expected | {"layers.1.down": whole, "layers.1.scale": scale.reshape(1)})


def test_what_no_tensor_writes_of_a_layer_that_quantizes_is_named() -> None:
    model = Quantizing()
    shadow = Shadow(model, CPU, forms=LoadForms(model.loaded, computed))
    part = {name: tensor for name, tensor in checkpoint(2).items() if name != "layers.1.down"}
    with pytest.raises(RuntimeError, match="no published tensor has written layers.1.down:"):
        shadow.load(part.items(), len(part))


def test_a_layer_that_quantizes_into_another_form_than_when_it_was_loaded_is_not_updated() -> None:
    model = Quantizing()
    shadow = Shadow(model, CPU, forms=LoadForms(model.loaded, lambda module: {}))
    with pytest.raises(RuntimeError, match=r"^Layer makes \{\} of its weights, and computes with \{'gate_up'"):
        shadow.load(checkpoint(2).items(), NUM_TENSORS)


def test_a_name_that_the_models_code_does_not_know_is_named() -> None:
    class Strict(nn.Module):
        def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            known = dict.fromkeys(["a.weight", "mlp.w1.weight"], 0)
            return {name for name, _ in tensors if known[name] == 0}

    def renamed(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        return ((name.replace("experts.gate_up_proj", "w1.weight"), tensor) for name, tensor in tensors)

    pairs = [("a.weight", torch.zeros(1)), ("mlp.experts.gate_up_proj", torch.zeros(1))]
    with pytest.raises(RuntimeError, match="^Strict.load_weights cannot take mlp.experts.gate_up_proj, as the tr"):
        load_weights(Strict(), pairs, 2)
    load_weights(Strict(), pairs, 2, renamed)
