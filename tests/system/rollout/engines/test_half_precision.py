"""Updates of an engine in half precision, whose weights a processor may pack, and of one that quantizes what it loads:
the trainer publishes bfloat16, and the shadow holds fp8."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from configs.weight_forms import QUANTIZATIONS
from rollout.engines.base import EngineSpec
from rollout.types import Completion
from tests.support.engines import EngineHost, hosted, request, update

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("quantization", [None, *sorted(QUANTIZATIONS)])]

PROMPTS = [tuple(random.Random(index).choices(range(5, 250), k=20 + index)) for index in range(4)]
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@contextmanager
def serving(folder: Path, engine_spec: EngineSpec, quantization: str | None) -> Iterator[EngineHost]:
    arguments = {"skip_tokenizer_init": True, "quantization": quantization}
    spec = replace(engine_spec, model_path=str(folder), dtype="bfloat16", engine_args=arguments)
    with hosted(spec) as host:
        host.run(host.engine.tag_loaded(0))
        host.run(host.engine.require_updatable())
        yield host


async def completions(host: EngineHost) -> list[Completion]:
    """Sample from every prompt, alone in the batch, so that the order of sums is the same in every engine."""
    return [await host.engine.generate(request(ids, temperature=1.0, seed=7, max_tokens=8)) for ids in PROMPTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Qwen2: with biases, which are not quantized."""
    folders = [tmp_path_factory.mktemp("quantized") / str(version) for version in range(2)]
    for version, folder in enumerate(folders):
        torch.manual_seed(version)
        causal_lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES), dtype=torch.bfloat16)
        with torch.no_grad():
            for name, parameter in causal_lm.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.5)
        causal_lm.save_pretrained(folder)
    return folders


def test_after_an_update_it_computes_as_a_fresh_engine_does(
    quantization: str | None, folders: list[Path], engine_spec: EngineSpec
) -> None:
    """Also with requests in flight, which keep their KV cache, and change weights between two tokens."""
    new = load_file(folders[1] / "model.safetensors")
    with serving(folders[1], engine_spec, quantization) as fresh:
        expected = fresh.run(completions(fresh))
    with serving(folders[0], engine_spec, quantization) as host:

        async def scenario() -> list[Completion]:
            requests = [request(ids, temperature=1.0, max_tokens=900) for ids in PROMPTS]
            tasks = [asyncio.create_task(host.engine.generate(each)) for each in requests]
            await host.every_one_has(len(PROMPTS), 5)
            await update(host.engine, new, 1)
            await host.every_one_has(len(PROMPTS), 5 + max(host.engine._llm.output_counts().values()))
            await host.engine.abort(None)
            return await asyncio.gather(*tasks)

        before = host.run(completions(host))
        for completion in host.run(scenario()):
            assert [span.global_steps for span in completion.spans] == [0, 1]
        found = host.run(completions(host))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert not np.array_equal(before[0].logprobs, expected[0].logprobs)
