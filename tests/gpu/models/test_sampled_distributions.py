"""What a GPU's engine says of its sampling, for a trainer to follow: the tokens that truncation left, and the experts
that were chosen. They have never run. Skipped without a GPU."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.rollout import MOST_KEPT
from configs.schema import Layout
from rollout.engines.vllm.engine import HAS_ROUTES
from rollout.types import Completion, GenerationRequest, TokenSequence
from tests.support.adapters import distributions_of_spans
from tests.support.engines import EngineHost, gpu_spec, hosted, prompt, request, tiny_gpu_spec, update
from tests.support.families import random_model
from tests.support.kept import normalized, rows_of
from tests.support.policy_gaps import kl, trained_minus_sampled
from tests.support.weights import random_weights
from trainer.worker.model import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LAYERS, TOP_K = 4, 4
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
}


@pytest.mark.parametrize("sampling", [{"top_p": 0.9, "top_k": 20}, {"top_p": 0.9}, {"min_p": 0.2}], ids=str)
def test_logprobs_are_those_over_the_tokens_that_were_left(sampling: dict[str, Any], tmp_path: Path) -> None:
    """Through an update, with captured graphs and steps that are scheduled ahead. In bfloat16, so near the truth."""
    with hosted(tiny_gpu_spec(tmp_path / "tiny")) as host:
        weights = {version: random_weights(host.model_path, version) for version in (1, 2)}
        asked = [request(prompt(index, 8), max_tokens=400, temperature=0.7, **sampling) for index in range(4)]

        async def scenario() -> list[Completion]:
            await update(host.engine, weights[1], 1)
            tasks = [asyncio.create_task(host.engine.generate(each)) for each in asked]
            await host.every_one_has(4, 30)
            await update(host.engine, weights[2], 2)
            return await asyncio.gather(*tasks)

        completions = host.run(scenario())
    for each, completion in zip(asked, completions, strict=True):
        kept = completion.kept
        assert kept is not None and kept.is_known.all() and kept.counts.max() <= sampling.get("top_k", MOST_KEPT)
        rows = rows_of(kept)
        assert all(token in row for token, row in zip(completion.token_ids.tolist(), rows, strict=True))
        truth = distributions_of_spans(tmp_path / "tiny", weights, each.prompt_ids, completion, temperature=0.7)
        assert np.abs(normalized(truth, completion) - completion.logprobs).mean() < 0.05


@pytest.mark.skipif(not HAS_ROUTES, reason="this version of vLLM does not say which experts it chose")
def test_a_trainer_that_follows_the_experts_is_nearer_to_the_engine(tmp_path: Path) -> None:
    """Across a prefix from the cache and prefills in chunks."""
    random_model("qwen3_moe", **SIZES).to(torch.bfloat16).save_pretrained(tmp_path / "moe")
    # Loaded as ours and the engine load it: `.to` would also round the frequencies of positions.
    policy = Policy(AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.bfloat16).eval(), 1.0)
    arguments = {"skip_tokenizer_init": True, "max_num_batched_tokens": 48, "enable_chunked_prefill": True}
    shared = prompt(0, 64)
    asked = [request((*shared, *prompt(1 + n, 6 + n)), temperature=1.0, max_tokens=64) for n in range(8)]
    with hosted(gpu_spec(tmp_path / "moe", engine_args=arguments, replay_routes=True)) as host:
        completions = host.run(generated(host, asked))
    policy.to("cuda")
    sequences = [TokenSequence.of(each.prompt_ids, its) for each, its in zip(asked, completions, strict=True)]
    for sequence in sequences:
        assert sequence.routes is not None and sequence.routes.is_known.all()
        assert sequence.routes.experts.shape[1:] == (LAYERS, TOP_K)
    followed = kl(trained_minus_sampled(policy, sequences, Layout.rows))
    own = kl(trained_minus_sampled(policy, [replace(each, routes=None) for each in sequences], Layout.rows))
    print(f"KL {own:.1e} with the trainer's own routes, {followed:.1e} with the engine's")
    assert followed < own / 2


async def generated(host: EngineHost, asked: list[GenerationRequest]) -> list[Completion]:
    await host.engine.tag_loaded(0)
    first = await host.engine.generate(asked[0])  # whose prefix the others find in the cache
    return [first, *await asyncio.gather(*map(host.engine.generate, asked[1:]))]
