"""Adapters beside linear layers against the dense weights that they stand for, and which layers get one."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from configs.model import LoraConfig
from configs.validate import ConfigError
from tests.support.families import random_model
from trainer.worker.checksum import base_checksum
from trainer.worker.lora import LoraLinear, adapters_off, add_adapters, draw_factors
from weight_sync.adapter import factor_names, is_factor, merged, published_name

LORA = LoraConfig(rank=3, alpha=6.0)


def adapted(causal_lm: Any, lora: LoraConfig = LORA, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A copy with adapters."""
    adapted = copy.deepcopy(causal_lm)
    add_adapters(adapted, lora, dtype)
    draw_factors(adapted, seed)
    return adapted


def randomize(causal_lm: nn.Module) -> None:
    """Let every B be as after some steps."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in causal_lm.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.1, generator=generator)


def layers_of(causal_lm: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in causal_lm.named_modules() if isinstance(module, LoraLinear)}


def random_layer(**given: Any) -> tuple[LoraLinear, nn.Linear]:
    """Return a layer whose B is not 0, in float64, and the linear layer of the same function."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 4, dtype=torch.float64)
    layer = LoraLinear(plain, rank=3, **{"scale": 2.0, "dropout": 0.0, **given}).double()
    layer.lora_A.weight.data.normal_()
    layer.lora_B.weight.data.normal_()
    dense = copy.deepcopy(plain)
    dense.weight.data += 2.0 * layer.lora_B.weight.data @ layer.lora_A.weight.data
    return layer, dense


def test_a_layer_computes_what_dense_weights_do_and_its_gradients_are_theirs() -> None:
    layer, dense = random_layer()
    x, weights = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(x), rtol=0, atol=1e-12)
    for module in (layer, dense):
        (module(x) * weights).sum().backward()
    change = dense.weight.grad
    assert change is not None
    a, b = layer.lora_A.weight, layer.lora_B.weight
    torch.testing.assert_close(b.grad, 2.0 * change @ a.detach().T, rtol=0, atol=1e-12)
    torch.testing.assert_close(a.grad, 2.0 * b.detach().T @ change, rtol=0, atol=1e-12)


def test_what_is_dropped_is_drawn_in_passes_with_a_gradient_only() -> None:
    layer, dense = random_layer(dropout=0.5)
    x = torch.randn(7, 5, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), dense(x), rtol=0, atol=1e-12)
    torch.manual_seed(4)
    found = layer(x)
    torch.manual_seed(4)
    kept = F.dropout(x, 0.5)
    a, b = layer.lora_A.weight, layer.lora_B.weight
    torch.testing.assert_close(found, F.linear(x, layer.weight, layer.bias) + 2.0 * kept @ a.T @ b.T)
    assert not torch.allclose(found, dense(x))


def test_a_model_with_adapters_is_that_with_merged_weights_and_without_them_the_first() -> None:
    first = random_model("qwen2")
    model = adapted(first)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, first(ids).logits), "B is 0"
        randomize(model)
        whole, factors = copy.deepcopy(first), {published_name(n): p for n, p in model.named_parameters()}
        for name, weight in whole.named_parameters():
            a, b = factor_names(name)
            if a in factors:
                weight.copy_(merged(weight, factors[a], factors[b], LORA.alpha / 3))
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=0, atol=1e-5)
        assert not torch.allclose(model(ids).logits, first(ids).logits)
        with adapters_off(model):
            assert torch.equal(model(ids).logits, first(ids).logits)
        assert not torch.allclose(model(ids).logits, first(ids).logits)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3"])
def test_adapters_of_experts_are_the_weights_that_replicas_and_exports_merge(family: str) -> None:
    """Bit for bit: both are made by the same code, and the experts' own forward computes with them."""
    lora = LoraConfig(rank=3, alpha=6.0, targets=["experts"])
    first = random_model(family)
    model, whole, ids = adapted(first, lora), copy.deepcopy(first), torch.arange(12).view(2, 6)
    factors = {published_name(name): factor for name, factor in model.named_parameters() if factor.requires_grad}
    stacked = [name for name, weight in first.named_parameters() if ".experts." in name and weight.dim() == 3]
    assert factors.keys() == {factor for name in stacked for factor in factor_names(name)} and len(stacked) >= 6
    assert all(is_factor(name) for name in factors)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, first(ids).logits), "B is 0"
        randomize(model)
        for name, weight in whole.named_parameters():
            a, b = factor_names(name)
            if a in factors:
                weight.copy_(merged(weight, factors[a], factors[b], lora.alpha / 3))
                for expert, (one_a, one_b) in enumerate(zip(factors[a], factors[b], strict=True)):
                    each = first.get_parameter(name)[expert] + 2.0 * one_b @ one_a
                    torch.testing.assert_close(weight[expert], each, rtol=0, atol=1e-5)
        logits = model(ids).logits
        assert torch.equal(logits, whole(ids).logits) and not torch.allclose(logits, first(ids).logits)
        with adapters_off(model):
            assert torch.equal(model(ids).logits, first(ids).logits)
    model(ids).logits.square().sum().backward()
    whole.requires_grad_(True)
    whole(ids).logits.square().sum().backward()
    for name in stacked:
        (a, b), change = (factors[each] for each in factor_names(name)), whole.get_parameter(name).grad
        assert a.grad is not None and b.grad is not None and change is not None
        torch.testing.assert_close(b.grad, 2.0 * change @ a.detach().mT, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(a.grad, 2.0 * b.detach().mT @ change, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("experts", {"gate_up_proj", "down_proj"}),
        ("experts.down_proj", {"down_proj"}),
        ("model.layers.1.mlp.experts.gate_up_proj", {"gate_up_proj"}),
    ],
)
def test_experts_get_an_adapter_where_they_are_named(target: str, names: set[str]) -> None:
    first = random_model("qwen3_moe")
    trained = {
        name.partition(".adapters.")[2].partition(".")[0]
        for name, parameter in adapted(first, LoraConfig(rank=2, targets=[target])).named_parameters()
        if parameter.requires_grad
    }
    assert trained == names
    assert not any(".adapters." in name for name, _ in adapted(first).named_parameters()), "all_linear"
    with pytest.raises(ConfigError, match="there are experts, k_proj, lm_head, o_proj, q_proj, v_proj"):
        adapted(first, LoraConfig(rank=2, targets=["down_proj"]))


def test_only_factors_are_trained_in_float32_beside_a_base_in_the_compute_dtype() -> None:
    first = random_model("llama")
    model = adapted(first, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        is_factor = ".lora_" in name
        assert (parameter.requires_grad, parameter.dtype) == (
            is_factor,
            torch.float32 if is_factor else torch.bfloat16,
        ), name
    names = {name for name, _ in first.named_parameters()}
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == names


def test_every_a_follows_from_the_seed_and_is_drawn_as_peft_draws_it() -> None:
    first = random_model("llama")
    same, again, other = (layers_of(adapted(first, seed=seed)) for seed in (3, 3, 4))
    factors = [layer.lora_A.weight for layer in same.values()]
    assert all(torch.equal(same[name].lora_A.weight, again[name].lora_A.weight) for name in same)
    assert not any(torch.equal(same[name].lora_A.weight, other[name].lora_A.weight) for name in same)
    assert len({factor.sum().item() for factor in factors}) == len(factors)
    for factor in factors:
        bound = 1 / math.sqrt(factor.shape[1])
        assert 0.8 * bound < factor.abs().max() <= bound


@pytest.mark.parametrize("family", ["qwen2", "phi3", "mixtral", "falcon_h1"])
def test_all_linear_is_every_linear_layer_but_the_head(family: str) -> None:
    first = random_model(family)
    expected = {name for name, module in first.named_modules() if type(module) is nn.Linear} - {"lm_head"}
    assert expected and layers_of(adapted(first)).keys() == expected


def test_layers_are_named_by_their_ends() -> None:
    first = random_model("qwen2")
    lora = LoraConfig(rank=2, targets=["v_proj", "layers.1.mlp.up_proj"])
    expected = {*(f"model.layers.{layer}.self_attn.v_proj" for layer in range(4)), "model.layers.1.mlp.up_proj"}
    assert layers_of(adapted(first, lora)).keys() == expected


@pytest.mark.parametrize("target", ["v_prj", "proj", "embed_tokens", "input_layernorm"])
def test_a_target_that_is_no_linear_layer_is_refused_with_those_that_there_are(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        add_adapters(random_model("qwen2"), LoraConfig(rank=2, targets=["q_proj", target]), torch.float32)
    assert str(caught.value) == (
        f"model.lora.targets=[q_proj,{target}]: Qwen2ForCausalLM has no linear layer {target}; "
        "there are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    )


def test_a_tied_head_is_refused_and_a_head_of_its_own_is_not() -> None:
    lora = LoraConfig(rank=2, targets=["lm_head"])
    with pytest.raises(ConfigError, match=r"targets=\[lm_head\]: lm_head of Qwen2ForCausalLM shares its weight"):
        add_adapters(random_model("qwen2", tie_word_embeddings=True), lora, torch.float32)
    assert layers_of(adapted(random_model("qwen2", tie_word_embeddings=False), lora)).keys() == {"lm_head"}


def test_the_checksum_of_the_base_is_of_its_names_and_values() -> None:
    first, same, changed = random_model("qwen2"), random_model("qwen2"), random_model("qwen2")
    changed.model.norm.weight.data[0] = 0.5
    assert base_checksum(first) == base_checksum(same)
    assert len({base_checksum(first), base_checksum(changed), base_checksum(random_model("llama"))}) == 3
