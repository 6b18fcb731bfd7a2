"""Updates under load of models whose weights vLLM changes after it has loaded them: experts and latent attention. They
have never run. Skipped without a GPU."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollout.types import Completion, FloatArray
from tests.support.engines import EngineHost, gpu_spec, hosted, prompt, request, update
from tests.support.families import random_model
from tests.support.latent_models import latent_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SIZES = {"vocab_size": 512, "hidden_size": 256, "head_dim": 64, "max_position_embeddings": 1024}
PROMPTS = [prompt(index, 20 + index) for index in range(4)]
GIVEN = [prompt(index, 60) for index in range(10, 14)]
ATOL = 0.1
"""Nats between two ways of computing the same in bfloat16. Other weights differ by several."""


def experts(folder: Path, seed: int) -> None:
    sizes = {"moe_intermediate_size": 128, "num_experts": 8, "initializer_range": 0.06}
    random_model("qwen3_moe", seed, **SIZES, **sizes).to(torch.bfloat16).save_pretrained(folder)


def latent(folder: Path, seed: int) -> None:
    """The heads are those of DeepSeek-V3, since kernels are made for them."""
    latent_model("deepseek_v3", folder, seed, qk_nope_head_dim=128, v_head_dim=128, num_attention_heads=16)


@pytest.mark.parametrize(
    ("make", "engine_args"),
    [
        pytest.param(experts, {"moe_backend": "triton"}, id="experts"),
        pytest.param(latent, {}, id="latent-attention"),
    ],
)
def test_an_update_reaches_what_the_engine_made_of_its_weights(
    make: Callable[[Path, int], None], engine_args: Mapping[str, Any], tmp_path: Path
) -> None:
    """Prefills as in a fresh engine, and decodes, which read other forms of the weights, as prefills of the same."""
    for seed in (0, 1):
        make(tmp_path / str(seed), seed)
    arguments = {"skip_tokenizer_init": True, **engine_args}
    new = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(tmp_path / "1/model.safetensors").items()}
    with hosted(gpu_spec(tmp_path / "1", engine_args=arguments)) as fresh:
        expected = fresh.run(scores(fresh))
    with hosted(gpu_spec(tmp_path / "0", engine_args=arguments)) as host:
        host.run(host.engine.tag_loaded(0))
        host.run(host.engine.require_updatable())
        before = host.run(scores(host))
        for completion in host.run(updated_under_load(host, new)):
            assert [span.global_steps for span in completion.spans] == [0, 1]
        np.testing.assert_allclose(host.run(scores(host)), expected, atol=ATOL)
        for decoded, prefilled in host.run(both_ways(host)):
            np.testing.assert_allclose(decoded, prefilled, atol=ATOL)
    assert np.abs(before - expected).mean() > 5 * ATOL


async def scores(host: EngineHost) -> FloatArray:
    return np.stack([await host.engine.score(np.array(ids, np.int32), f"score-{ids}") for ids in GIVEN])


async def updated_under_load(host: EngineHost, new: Mapping[str, torch.Tensor]) -> list[Completion]:
    asked = [request(ids, temperature=1.0, max_tokens=900) for ids in PROMPTS]
    tasks = [asyncio.create_task(host.engine.generate(each)) for each in asked]
    await host.every_one_has(len(PROMPTS), 5)
    await update(host.engine, dict(new), 1)
    await host.every_one_has(len(PROMPTS), 5 + max(host.engine._llm.output_counts().values()))
    await host.engine.abort(None)
    return await asyncio.gather(*tasks)


async def both_ways(host: EngineHost) -> list[tuple[FloatArray, FloatArray]]:
    """Return the logprobs of answers, as they were decoded and as they are read."""
    pairs = []
    for ids in PROMPTS:
        answer = await host.engine.generate(request(ids, temperature=1.0, max_tokens=16))
        read = await host.engine.score(np.array([*ids, *answer.token_ids], np.int32), f"read-{ids}")
        pairs.append((answer.logprobs, read[len(ids) - 1 :]))
    return pairs
