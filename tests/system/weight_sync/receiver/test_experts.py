"""Updates of mixtures of experts in real engines: what the trainer publishes, stacked, becomes what a fresh engine
loads from the files, bit for bit."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs.model import LoraConfig
from rollout.engines.base import EngineSpec
from rollout.types import Completion
from tests.support.engines import EngineHost, hosted, pause, prompt, request, resume
from tests.support.families import VOCAB_SIZE, random_model
from tests.support.weights import publish, release, tag_of
from trainer.worker.lora import add_adapters
from trainer.worker.model import Policy, constant_names, local_shards
from weight_sync.adapter import factor_names, merged
from weight_sync.protocol import Adapter, Manifest

WIDTHS = {"hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2, "max_position_embeddings": 128}
"""vLLM's attention on CPUs has no smaller heads."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "glm4_moe": {},
    "gpt_oss": {"sliding_window": 32},
    "mixtral": {"sliding_window": None},
    "deepseek_v3": {  # in the size of latent vectors that vLLM's kernel for CPUs knows, and as its config.json routes
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32},
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    },
}
PROMPT = tuple(token % VOCAB_SIZE for token in prompt(0, 40))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_is_what_a_fresh_engine_loads(family: str, engine_spec: EngineSpec, tmp_path: Path) -> None:
    """Loaded, updated to other weights and back: the same tensors in the engine, and the same tokens and logprobs."""
    first, other = random_policy(family, 1), random_policy(family, 2)
    first.causal_lm.save_pretrained(tmp_path)
    with hosted(spec_of(engine_spec, tmp_path)) as host:
        host.run(host.engine.require_updatable())
        host.run(host.engine.tag_loaded(0))
        fresh, answer = tensors_of(host), sampled(host)
        assert np.abs(answer.logprobs - logprobs_of(first, answer)).max() < 1e-5

        with pytest.raises(Exception, match=r"no published tensor has written .*layers\.1.*experts.*w2_weight"):
            host.run(update(host, published(other, 1, without="layers.1.mlp.experts.down_proj")))

        host.run(update(host, published(other, 2)))
        changed = tensors_of(host)
        same = [name for name in fresh if fresh[name] == changed[name]]
        assert all(name.endswith(("e_score_correction_bias", "cos_sin_cache")) for name in same), same
        other_answer = sampled(host)
        assert np.abs(other_answer.logprobs - logprobs_of(other, other_answer)).max() < 1e-5

        host.run(update(host, published(first, 3)))
        assert tensors_of(host) == fresh
        again = sampled(host)
        assert again.token_ids.tolist() == answer.token_ids.tolist() != other_answer.token_ids.tolist()
        assert again.logprobs.tolist() == answer.logprobs.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_adapters_of_experts_become_what_a_fresh_engine_loads(
    family: str, engine_spec: EngineSpec, tmp_path: Path
) -> None:
    """A first update brings the base and an adapter, a second one another adapter only."""
    policy, scale = random_policy(family, 1), 6.0 / 3
    policy.causal_lm.save_pretrained(tmp_path / "base")
    whole = copy.deepcopy(policy.causal_lm)
    add_adapters(policy.causal_lm, LoraConfig(rank=3, alpha=6.0, targets=["q_proj", "experts"]), torch.float32)
    with hosted(spec_of(engine_spec, tmp_path / "base")) as host:
        host.run(host.engine.tag_loaded(0))
        for version in (1, 2):
            factors = random_factors(policy, version)
            tensors = dict(local_shards(policy, torch.float32, frozen=version == 1))
            assert factors.keys() <= tensors.keys() and (len(tensors) == len(factors)) == (version == 2)
            adapter, constants = Adapter(scale=scale, base=77), constant_names(policy)
            manifest = replace(publish(tensors, version), adapter=adapter, constants=constants)
            host.run(update(host, manifest))
        updated = tensors_of(host)
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            a, b = factor_names(name)
            weight.copy_(merged(weight, factors[a], factors[b], scale) if a in factors else weight)
    whole.save_pretrained(tmp_path / "merged")
    with hosted(spec_of(engine_spec, tmp_path / "merged")) as host:
        assert tensors_of(host) == updated


def random_factors(policy: Policy, seed: int) -> dict[str, torch.Tensor]:
    """Give the adapters other factors, and return those by their published names."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1, generator=generator)
    return dict(local_shards(policy, torch.float32, frozen=False))


@pytest.mark.parametrize("name", ["SILU", "GELU", "GELU_TANH", "SWIGLUOAI"])
@pytest.mark.parametrize("on_input", [False, True])
def test_experts_are_computed_as_one_token_after_another(name: str, on_input: bool) -> None:
    """Experts of odd widths, one of which has no token, with biases. Weights on the input are not applied again."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from weight_sync.receiver.vllm_on_cpu import activated, compute_experts

    torch.manual_seed(0)
    activation = MoEActivation[name]
    tokens, w1, w2 = torch.randn(7, 12), torch.randn(4, 40, 12), torch.randn(4, 12, 20)
    biases = SimpleNamespace(w1_bias=torch.randn(4, 40), w2_bias=torch.randn(4, 12))
    weights, ids = torch.rand(7, 2), torch.stack([torch.randperm(3)[:2] for _ in range(7)]).int()
    output = torch.full((7, 12), torch.nan)
    compute_experts(
        biases,
        **{"output": output, "hidden_states": tokens, "w1": w1, "w2": w2, "topk_weights": weights, "topk_ids": ids},
        activation=activation,
        expert_map=None,
        apply_router_weight_on_input=on_input,
    )
    for token, row, scales, chosen in zip(tokens, output, weights, ids.tolist(), strict=True):
        made = [
            (1.0 if on_input else scale)
            * (w2[e] @ activated((w1[e] @ token + biases.w1_bias[e])[None], activation)[0] + biases.w2_bias[e])
            for scale, e in zip(scales, chosen, strict=True)
        ]
        assert torch.allclose(row, sum(made, torch.zeros(12)), atol=1e-4)


def random_policy(family: str, seed: int) -> Policy:
    """Return a model in which no parameter is what initialization leaves it at, such as a bias of 0. What is never
    trained is the same for all seeds."""
    policy = Policy(random_model(family, **(WIDTHS | FAMILIES[family])), 1.0)
    generator = torch.Generator().manual_seed(0)
    for name in constant_names(policy):
        policy.causal_lm.get_buffer(name).add_(torch.rand(4, generator=generator))
    generator.manual_seed(seed)
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def spec_of(engine_spec: EngineSpec, folder: Path) -> EngineSpec:
    arguments = {"skip_tokenizer_init": True}
    return replace(
        engine_spec, model_path=str(folder), max_model_len=128, kv_cache_bytes=1 << 22, engine_args=arguments
    )


def published(policy: Policy, global_steps: int, without: str | None = None) -> Manifest:
    """Publish the weights as a rank does, under the names of modules."""
    tensors = {
        name: tensor
        for name, tensor in local_shards(policy, torch.float32)
        if without is None or not name.endswith(without)
    }
    return replace(publish(tensors, global_steps), constants=constant_names(policy))


async def update(host: EngineHost, manifest: Manifest) -> None:
    try:
        await host.engine.stage(manifest)
        await pause(host.engine)
        assert await host.engine.swap(manifest.global_steps) == [tag_of(manifest)]
        await resume(host.engine)
    finally:
        release()


def tensors_of(host: EngineHost) -> dict[str, str]:
    """Return vLLM's own digests of the tensors that it computes with."""
    (digests,) = host.run(host.engine._llm.compute_weight_checksums())
    return digests


def sampled(host: EngineHost) -> Completion:
    return host.run(host.engine.generate(request(PROMPT, max_tokens=24, temperature=1.0, seed=0)))


@torch.no_grad()
def logprobs_of(policy: Policy, answer: Completion) -> np.ndarray:
    tokens = torch.tensor([[*PROMPT, *answer.token_ids.tolist()]])
    return policy.plain_logprobs(tokens)[0, len(PROMPT) - 1 :].numpy()
