"""The experts that the real engine says it chose: replayed by the trainer in half precision, its logprobs are the
sampler's, across prefills in chunks, prefixes from the cache, a pause, cut keys and values, and a change of engines."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import Layout
from configs.validate import ConfigError
from rollout.engines.base import EngineSpec
from rollout.replica.continuation import generate_in_parts
from rollout.types import Completion, GenerationRequest, TokenSequence
from tests.support.engines import EngineHost, hosted, pause, prompt, request, resume
from tests.support.families import random_model
from tests.support.kept import rows_of
from tests.support.policy_gaps import kl, trained_minus_sampled
from trainer.worker.model import Policy

pytestmark = pytest.mark.slow
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
LAYERS, TOP_K = 4, 4
NUM_PROMPTS, SHARED, NUM_TOKENS = 12, 64, 48


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(random_model("qwen3_moe", **SIZES).to(torch.bfloat16), 1.0)


@pytest.fixture(scope="module")
def host(policy: Policy, engine_spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    folder = tmp_path_factory.mktemp("models") / "moe"
    policy.causal_lm.save_pretrained(folder)
    with hosted(spec_of(engine_spec, folder)) as host:
        host.run(host.engine.tag_loaded(0))
        yield host


def spec_of(engine_spec: EngineSpec, folder: Path) -> EngineSpec:
    # The longest prompts do not fit into a step.
    arguments = {"skip_tokenizer_init": True, "max_num_batched_tokens": 48, "enable_chunked_prefill": True}
    changes: dict[str, Any] = {"model_path": str(folder), "dtype": "bfloat16", "max_model_len": 256}
    return replace(engine_spec, **changes, kv_cache_bytes=64 << 20, replay_routes=None, engine_args=arguments)


def requests(num_tokens: int = NUM_TOKENS, seed: int = 0) -> list[GenerationRequest]:
    shared = prompt(seed, SHARED)
    sampling = {"temperature": 1.0, "max_tokens": num_tokens}
    return [request((*shared, *prompt(seed + 1 + number, 6 + number)), **sampling) for number in range(NUM_PROMPTS)]


def sequence_of(request: GenerationRequest, completion: Completion) -> TokenSequence:
    assert completion.routes is not None
    assert completion.routes.experts.shape == (len(request.prompt_ids) + completion.num_tokens - 1, LAYERS, TOP_K)
    assert completion.routes.is_known.all(), "of the prefix cache too"
    assert all(len(set(row)) == TOP_K for row in completion.routes.experts.reshape(-1, TOP_K).tolist())
    return TokenSequence.of(request.prompt_ids, completion)


def check_kl(policy: Policy, sequences: list[TokenSequence]) -> None:
    own = kl(trained_minus_sampled(policy, [replace(sequence, routes=None) for sequence in sequences], Layout.rows))
    for layout in (Layout.rows, Layout.tree):
        replayed = kl(trained_minus_sampled(policy, sequences, layout))
        print(f"{layout.value}: KL {own:.1e} with the trainer's own routes, {replayed:.1e} with the sampler's")
        assert replayed < 2e-4 and replayed < own / 2


async def generated(host: EngineHost, some: list[GenerationRequest]) -> list[Completion]:
    first = await host.engine.generate(some[0])  # whose prefix the others find in the cache
    return [first, *await asyncio.gather(*map(host.engine.generate, some[1:]))]


def test_the_trainer_is_as_near_to_the_sampler_as_rounding_allows(host: EngineHost, policy: Policy) -> None:
    some = requests()
    completions = host.run(generated(host, some))
    assert [completion.cached_tokens for completion in completions[1:]] == [SHARED] * (NUM_PROMPTS - 1)
    check_kl(policy, [sequence_of(*pair) for pair in zip(some, completions, strict=True)])


@pytest.mark.parametrize("clear_cache", [False, True], ids=["kept", "computed-again"])
def test_requests_that_go_on_after_a_pause_say_each_input_once(
    host: EngineHost, policy: Policy, clear_cache: bool
) -> None:
    some = requests(seed=100 + clear_cache)

    async def paused() -> list[Completion]:
        running = asyncio.gather(*map(host.engine.generate, some))
        await host.every_one_has(NUM_PROMPTS, 5)
        await pause(host.engine, clear_cache)
        before = host.engine.partials({each.request_id: 0 for each in some})
        await resume(host.engine)
        completions = await running
        for each, completion in zip(some, completions, strict=True):
            part = before[each.request_id]
            length = len(each.prompt_ids) + part.num_tokens - 1
            assert part.routes is not None and completion.routes is not None
            assert np.array_equal(part.routes.experts, completion.routes.experts[:length])
        return completions

    completions = host.run(paused())
    check_kl(policy, [sequence_of(*pair) for pair in zip(some, completions, strict=True)])


def test_a_request_that_goes_on_in_another_engine_keeps_what_the_first_said(
    host: EngineHost, policy: Policy, engine_spec: EngineSpec
) -> None:
    """The experts of what it has, and the tokens that top-k and top-p had left. The second engine says the rest."""
    some = [
        replace(each, sampling=replace(each.sampling, top_p=0.95, top_k=20)) for each in requests(NUM_TOKENS, seed=200)
    ]
    halves = [replace(each, sampling=replace(each.sampling, max_tokens=NUM_TOKENS // 2)) for each in some]

    async def begun() -> list[Completion]:
        return await asyncio.gather(*map(host.engine.generate, halves))

    async def continued(other: EngineHost, each: GenerationRequest, partial: Completion) -> Completion:
        sizes: list[int] = []

        async def rest(part: GenerationRequest, _: Completion | None) -> Completion:
            completion = await other.engine.generate(part)
            assert completion.routes is not None
            sizes.append(len(completion.routes))
            return completion

        again = replace(each, partial=replace(partial, finish_reason=""))
        whole, _ = await generate_in_parts(again, rest, lambda _: False)
        assert sizes == [NUM_TOKENS - NUM_TOKENS // 2], "only what was not known is sent"
        return whole

    async def ended(other: EngineHost, partials: list[Completion]) -> list[Completion]:
        await other.engine.tag_loaded(0)
        return await asyncio.gather(*(continued(other, *pair) for pair in zip(some, partials, strict=True)))

    partials = host.run(begun())
    with hosted(spec_of(engine_spec, host.model_path)) as other:
        completions = other.run(ended(other, partials))
    for partial, whole in zip(partials, completions, strict=True):
        assert whole.routes is not None and partial.routes is not None
        assert np.array_equal(whole.routes.experts[: len(partial.routes)], partial.routes.experts)
        assert whole.kept is not None and partial.kept is not None and whole.kept.is_known.all()
        assert rows_of(whole.kept)[: partial.num_tokens] == rows_of(partial.kept)
        assert len(whole.kept.counts) == whole.num_tokens and whole.kept.counts.max() > 1
    check_kl(policy, [sequence_of(*pair) for pair in zip(some, completions, strict=True)])


def test_a_dense_model_says_nothing_and_is_refused_where_it_has_to(engine_spec: EngineSpec) -> None:
    from rollout.engines.vllm.engine import _engine_args, engine_config

    spec = replace(engine_spec, replay_routes=None)
    assert not engine_config(spec, _engine_args(spec)).aux_output_config.enabled
    with pytest.raises(ConfigError, match=r"model.replay_routes=true: .* is a dense model: set it to null or false"):
        engine_config(replace(spec, replay_routes=True), _engine_args(spec))
