"""A model that can never run is refused by its config.json and the names of its files."""

import json
from pathlib import Path

import pytest

from configs.model import LoraConfig, LoraServing
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from scripts.launch import model_support
from scripts.launch.model_support import causal_types, check_model
from tests.support.compose import changed

QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MLA = {"model_type": "deepseek_v3", "kv_lora_rank": 512}
UNTESTED_MLA = MLA | {"model_type": "longcat_flash"}


def config_of(folder: Path, model: object, *files: str) -> Config:
    (folder / "config.json").write_text(json.dumps(model))
    for file in files:
        (folder / file).touch()
    return changed(Config(), model__kind=ModelKind.hf, model__path=str(folder))


REFUSED = [
    ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder-decoder"),
    ({"model_type": "bart", "is_encoder_decoder": True}, "bart is an encoder-decoder"),
    ({"model_type": "nothing-like-it"}, "the installed transformers has no causal .* model_type=nothing-like-it"),
    ({"model_type": "clip"}, "has no causal language model of model_type=clip"),
    (
        {"model_type": "internlm", "auto_map": {"AutoModelForCausalLM": "m.M"}},
        "internlm is code in the model",
    ),
    ({}, "its config.json names no model_type"),
    ([], "config.json must be a JSON object, is list"),
]
REFUSED_UPDATES = [
    (UNTESTED_MLA, "longcat_flash: updates of its multi-head latent attention are untested: .* deepseek_v3"),
    ({"model_type": "llama4_text", "text_config": UNTESTED_MLA}, "longcat_flash: updates of its multi-head"),
    (
        QWEN | {"quantization_config": {"quant_method": "awq"}},
        r"quantized \(awq\), .* set model.lora.rank and",
    ),
    ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, r"quantized \(mxfp4\)"),
    (QWEN | {"text_config": {**QWEN, "quantization_config": {}}, "quantization_config": {"bits": 4}}, r"\(unknown\)"),
]


@pytest.mark.parametrize(("model", "message"), [*REFUSED, *REFUSED_UPDATES])
def test_a_training_names_what_keeps_the_model_from_running(tmp_path: Path, model: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?m)^model.path={tmp_path}: .*{message}"):
        check_model(config_of(tmp_path, model, "model.safetensors"), trains=True, updates=True)


@pytest.mark.parametrize(("model", "message"), REFUSED_UPDATES[2:])
def test_a_quantized_model_is_served_with_an_adapter_beside_it(tmp_path: Path, model: object, message: str) -> None:
    config = config_of(tmp_path, model, "model.safetensors")
    check_model(config, trains=True, updates=False)
    adapter = changed(config, model__lora=LoraConfig(rank=8, serve=LoraServing.adapter))
    check_model(adapter, trains=True, updates=True)
    with pytest.raises(ConfigError, match=message):
        check_model(changed(config, model__lora=LoraConfig(rank=8)), trains=True, updates=True)


@pytest.mark.parametrize("files", [(), ("tokenizer.json",), ("adapter_model.safetensors",), ("consolidated.00.pth",)])
def test_a_folder_without_weights_is_refused_by_every_command(tmp_path: Path, files: tuple[str, ...]) -> None:
    for trains in (True, False):
        with pytest.raises(ConfigError, match=r"the folder has a config.json and no weights: model\*.safetensors or"):
            check_model(config_of(tmp_path, QWEN, *files), trains=trains, updates=trains)


@pytest.mark.parametrize("file", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_what_can_run_is_let_through(tmp_path: Path, file: str) -> None:
    check_model(config_of(tmp_path, QWEN, file), trains=True, updates=True)
    check_model(config_of(tmp_path, MLA, file), trains=True, updates=True)
    check_model(changed(Config(), model__kind=ModelKind.hf, model__path="nobody/has-this"), trains=True, updates=True)
    check_model(Config(), trains=True, updates=True)


@pytest.mark.parametrize(
    ("key", "way_out"), [("model.replay_routes", "null or false"), ("trainer.expert_parallel", "false")]
)
def test_what_is_for_mixtures_is_refused_of_a_dense_model(key: str, way_out: str, tmp_path: Path) -> None:
    keys = {key.replace(".", "__"): True}
    with pytest.raises(ConfigError, match=f"^{key}=True: model.path has no experts: set it to {way_out}"):
        check_model(changed(config_of(tmp_path, QWEN, "model.safetensors"), **keys), trains=True, updates=True)
    moe = {**QWEN, "text_config": {"num_experts": 4}}
    check_model(changed(config_of(tmp_path, moe), **keys), trains=True, updates=True)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_that_the_ranks_do_not_divide_are_refused(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, {**QWEN, "text_config": {name: 6}}, "model.safetensors")
    divided = changed(config, trainer__expert_parallel=True)
    check_model(changed(divided, trainer__num_ranks=3), trains=True, updates=True)
    check_model(changed(divided, trainer__num_ranks=4), trains=False, updates=False)
    wrong = rf"^trainer.expert_parallel=True: trainer.num_ranks=4 must divide the 6 experts of model.path \({name}\)"
    with pytest.raises(ConfigError, match=wrong):
        check_model(changed(divided, trainer__num_ranks=4), trains=True, updates=True)


def test_adapters_beside_experts_are_refused_on_a_cpu(tmp_path: Path) -> None:
    adapter = {"model__lora": LoraConfig(rank=8, serve=LoraServing.adapter)}
    tiny = changed(Config(), model__num_experts=4)
    large = config_of(tmp_path, {**QWEN, "num_experts": 4}, "model.safetensors")
    for config in (tiny, large):
        served = changed(config, **adapter)
        with pytest.raises(
            ConfigError, match=r"^model.lora.serve=adapter: must be merged for a mixture of experts on a"
        ):
            check_model(served, trains=True, updates=True, device="cpu")
        check_model(served, trains=True, updates=True, device="cuda")
        check_model(config, trains=True, updates=True, device="cpu")
    check_model(changed(Config(), **adapter), trains=True, updates=True, device="cpu")


def test_what_is_served_may_be_a_type_that_only_the_engine_knows(tmp_path: Path) -> None:
    check_model(config_of(tmp_path, {"model_type": "new"}, "model.safetensors"), trains=False, updates=False)


def test_a_model_in_the_cache_of_the_hub_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_of(tmp_path, {"model_type": "t5", "is_encoder_decoder": True})
    monkeypatch.setattr(model_support, "try_to_load_from_cache", lambda path, file: str(tmp_path / file))
    cached = changed(Config(), model__kind=ModelKind.hf, model__path="google-t5/t5-small")
    with pytest.raises(ConfigError, match="^model.path=google-t5/t5-small: t5 is an encoder-decoder"):
        check_model(cached, trains=True, updates=True)


def test_the_types_are_those_of_the_installed_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert causal_types() == frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
