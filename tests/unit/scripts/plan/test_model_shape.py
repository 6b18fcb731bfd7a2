"""The sizes of a model, without its weights."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from scripts.plan.model_shape import LayerShape, ModelShape, model_shape, teacher_shape
from scripts.plan.model_shape import shape_of as whole_shape
from tests.support.compose import changed
from tests.support.families import random_model
from trainer.tiny.model import ModelSize, build_model
from trainer.worker.loading import open_causal_lm
from trainer.worker.lora import target_layers


def shape_of(folder: Path) -> ModelShape:
    shape = model_shape(changed(Config(), model__kind=ModelKind.hf, model__path=str(folder)))
    assert shape is not None
    return shape


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3_moe"])
def test_sizes_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    model.save_pretrained(tmp_path)
    shape, layers = shape_of(tmp_path), model.base_model.get_submodule("h" if family == "gpt2" else "layers")
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.num_layers, shape.layer_parameters) == (
        4,
        sum(parameter.numel() for parameter in layers[3].parameters()),
    )
    assert shape.rest_parameters == shape.num_parameters - 4 * shape.layer_parameters
    assert shape.head_parameters == 64 * 32


@pytest.mark.parametrize("targets", [["all_linear"], ["q_proj", "layers.1.self_attn.o_proj"]])
@pytest.mark.parametrize("family", ["qwen2", "phi3", "qwen3_moe"])
def test_adapters_are_counted_as_they_are_made(family: str, targets: list[str], tmp_path: Path) -> None:
    if family == "phi3":
        targets = [target.replace("q_proj", "qkv_proj") for target in targets]
    random_model(family).save_pretrained(tmp_path)
    layers = target_layers(open_causal_lm(str(tmp_path))[0], targets).values()
    expected = sum(4 * (layer.in_features + layer.out_features) for layer in layers)
    assert shape_of(tmp_path).adapter_parameters(4, targets) == expected


def test_a_layer_is_read_from_the_config(tmp_path: Path) -> None:
    random_model("qwen3").save_pretrained(tmp_path)
    assert shape_of(tmp_path).layer == LayerShape(
        hidden=32, query=32, key=16, norms=2 * 32 + 32 + 16, feed_forward=48, is_gated=True, experts=0
    )
    random_model("qwen3_moe").save_pretrained(tmp_path)
    layer = shape_of(tmp_path).layer
    assert layer is not None and (layer.feed_forward, layer.experts) == (2 * 16, 2)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss", "mixtral", "deepseek_v3"])
def test_the_experts_are_those_that_ranks_divide(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    model.save_pretrained(tmp_path)
    experts = [each for each in model.modules() if "_is_expert_parallel" in vars(each)]
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in experts]
    mixture = shape_of(tmp_path).mixture
    assert mixture is not None and (mixture.num_parameters, mixture.layer_parameters) == (sum(sizes), max(sizes))
    assert mixture.num_experts == experts[0].num_experts
    assert mixture.per_token == model.config.num_experts_per_tok
    stacked = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    of_modules = whole_shape(stacked, model.config.to_dict()).mixture
    assert of_modules is not None and replace(of_modules, widths=mixture.widths) == mixture
    stacked_weights = [weight for each in experts for weight in each.parameters() if weight.dim() == 3]
    factors = sum(len(weight) * sum(weight.shape[1:]) for weight in stacked_weights)
    assert of_modules.widths == factors <= mixture.widths < 1.4 * factors


@pytest.mark.parametrize("family", ["mamba", "jamba", "qwen3_next", "deepseek_v3"])
def test_what_a_layer_of_another_kind_keeps_is_not_known(family: str, tmp_path: Path) -> None:
    random_model(family).save_pretrained(tmp_path)
    assert shape_of(tmp_path).layer is None


@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "num_experts", "millions"), [(64, 2, 0, 0.2), (192, 4, 0, 2.2), (64, 2, 8, 0.5)]
)
def test_the_models_made_here_have_the_size_that_the_pages_say(
    hidden_size: int, num_layers: int, num_experts: int, millions: float, tmp_path: Path
) -> None:
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "num_experts": num_experts}
    shape = model_shape(changed(Config(), **{f"model__{name}": size for name, size in sizes.items()}))
    assert shape is not None and round(shape.num_parameters / 1e6, 1) == millions
    build_model(448, 0, ModelSize(**sizes)).save_pretrained(tmp_path)
    of_files = shape_of(tmp_path)
    assert (shape.num_parameters, shape.layer_parameters, shape.rest_parameters) == (
        of_files.num_parameters,
        of_files.layer_parameters,
        of_files.rest_parameters,
    )
    assert (shape.layer, shape.num_layers) == (of_files.layer, of_files.num_layers)
    assert shape.mixture == of_files.mixture and (shape.mixture is None) == (num_experts == 0)


def test_a_model_that_is_not_here_has_no_shape_and_damaged_files_are_refused(tmp_path: Path) -> None:
    config = changed(Config(), model__kind=ModelKind.hf, model__path="no/such-model-here")
    assert model_shape(config) is None
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"^model\.path=.*: model.safetensors cannot be read: "):
        shape_of(tmp_path)
    with pytest.raises(ConfigError, match=r"^teacher\.path=.*: model.safetensors cannot be read: "):
        teacher_shape(changed(Config(), teacher__path=str(tmp_path)))


def test_the_teacher_has_sizes_of_its_own(tmp_path: Path) -> None:
    assert teacher_shape(Config()) is None
    random_model("qwen2").save_pretrained(tmp_path)
    assert teacher_shape(changed(Config(), teacher__path=str(tmp_path))) == shape_of(tmp_path)


def test_only_the_files_that_transformers_loads_count(tmp_path: Path) -> None:
    """One billion parameters in files with a hole in the place of the data, and no config."""
    for number, shape in enumerate(([1000, 1000, 500], [500_000_000])):
        tensor = {"dtype": "I8", "shape": shape, "data_offsets": [0, 500_000_000]}
        text = json.dumps({"a": tensor}).encode()
        for name in (f"model-0000{number}-of-00002", "consolidated"):
            with (tmp_path / f"{name}.safetensors").open("wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                file.truncate(file.tell() + 500_000_000)
    assert shape_of(tmp_path).num_parameters == 10**9
    assert shape_of(tmp_path).layer is None
