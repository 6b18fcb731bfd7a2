"""The real vLLM engine: versions of tokens, prefix cache, pause, logprobs, each held against the truth."""

import asyncio
import random
import time
from dataclasses import fields, replace
from itertools import count

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from configs.checks.engine_args import known_arguments
from rollout.engines.base import EngineSpec
from rollout.types import Completion, GenerationRequest
from tests.support.engines import (
    BOTH_SCHEDULERS,
    MAX_NUM_SEQS,
    EngineHost,
    assert_tokens_equal_tags,
    prompt,
    reference_logprobs,
    request,
    update,
)
from tests.support.weights import FIRST_TOKEN, emitting_weights, publish, random_weights, release

request_numbers = count()


@pytest.mark.slow
@BOTH_SCHEDULERS
def test_every_token_equals_its_tag(host: EngineHost, native: bool) -> None:
    """Version v always emits token 40 + v, so the tokens themselves say which weights sampled them."""

    async def scenario() -> list[Completion]:
        first = 10 if native else 30  # versions only ever grow
        await update(host.engine, emitting_weights(host.model_path, FIRST_TOKEN + first), first)
        chance = random.Random(0)

        async def one(index: int) -> Completion:
            await asyncio.sleep(chance.random() * 2.5)
            return await host.engine.generate(
                request(prompt(index, chance.randint(3, 200)), max_tokens=chance.randint(1, 700))
            )

        async def updates() -> None:
            for version in range(first + 1, first + 19):
                await asyncio.sleep(0.05)
                await update(host.engine, emitting_weights(host.model_path, FIRST_TOKEN + version), version)

        async def block_the_loop() -> None:
            while True:  # outputs then pile up behind the reply to the pause
                await asyncio.sleep(0.005)
                time.sleep(0.03)

        async def ask() -> None:
            while True:
                await asyncio.sleep(0.02)
                pieces = host.engine.partials(dict.fromkeys(host.engine.running, 3))  # as if 3 of each were known
                for piece in pieces.values():
                    assert_tokens_equal_tags(piece)
                partials.append(pieces)

        partials: list[dict[str, Completion]] = []
        asker = asyncio.create_task(ask())
        blocker = asyncio.create_task(block_the_loop())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(5 * MAX_NUM_SEQS)]
            group.create_task(updates())
        blocker.cancel()
        assert not asker.done() and sum(map(len, partials)) > MAX_NUM_SEQS
        asker.cancel()
        return [task.result() for task in tasks]

    completions = host.run(scenario())
    for completion in completions:
        assert_tokens_equal_tags(completion)
    assert max(len(completion.spans) for completion in completions) >= 3
    assert sum(len(completion.spans) > 1 for completion in completions) >= MAX_NUM_SEQS


@BOTH_SCHEDULERS
def test_logprobs_are_those_of_the_live_weights(host: EngineHost) -> None:
    """A stale layer would still emit plausible tokens: so every logprob is recomputed by transformers."""
    ids = prompt(1, 40)
    for version in (50, 51):
        weights = random_weights(host.model_path, seed=version)
        host.run(update(host.engine, weights, version))
        completion = host.run(host.engine.generate(request(ids, temperature=1.0, max_tokens=30, seed=0)))
        expected = reference_logprobs(host, weights, [*ids, *completion.token_ids.tolist()], start=len(ids))
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def test_logprobs_are_of_the_processed_distribution(host: EngineHost) -> None:
    """Temperature and top-p are in the logprob: it is that of the distribution the token was drawn from."""
    ids, temperature, top_p = prompt(2, 20), 0.7, 0.6
    weights = random_weights(host.model_path, seed=60)
    host.run(update(host.engine, weights, 60))
    completion = host.run(
        host.engine.generate(request(ids, temperature=temperature, top_p=top_p, max_tokens=20, seed=0))
    )
    model = AutoModelForCausalLM.from_pretrained(host.model_path, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    tokens = [*ids, *completion.token_ids.tolist()]
    with torch.no_grad():
        probabilities = F.softmax(model(torch.tensor([tokens])).logits[0, len(ids) - 1 : -1].float() / temperature, -1)
    for position, token in enumerate(completion.token_ids.tolist()):
        ordered, order = probabilities[position].sort(descending=True)
        nucleus = order[: int((ordered.cumsum(0) < top_p).sum()) + 1]
        assert token in nucleus
        expected = (probabilities[position, token] / probabilities[position, nucleus].sum()).log()
        assert completion.logprobs[position] == pytest.approx(expected.item(), abs=2e-4)


@pytest.mark.parametrize("salted", [True, False], ids=["salted", "not-salted"])
def test_new_requests_read_no_prefix_of_older_weights(
    host: EngineHost, salted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same request without the salt reads the KV cache of the old weights: the fault that the salt is there for."""
    monkeypatch.setattr(host.engine._llm, "salt_prefix_cache", salted)
    version = 70 if salted else 80
    ids = prompt(version, 200)
    old, new = (random_weights(host.model_path, seed) for seed in (version, version + 1))

    async def scenario() -> Completion:
        await update(host.engine, old, version)
        await host.engine.generate(request(ids, max_tokens=1))
        kept = asyncio.create_task(host.engine.generate(request(prompt(0, 30), max_tokens=900)))
        await host.every_one_has(1, 5)  # a kept request: with one running, vLLM cannot reset its prefix cache
        await update(host.engine, new, version + 1)
        completion = await host.engine.generate(request(ids, max_tokens=1))
        kept.cancel()
        return completion

    completion = host.run(scenario())
    expected = reference_logprobs(host, new, [*ids, *completion.token_ids.tolist()], start=len(ids))
    if salted:
        assert completion.cached_tokens == 0
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
    else:
        assert completion.cached_tokens >= 128
        assert abs(completion.logprobs[0] - expected[0]) > 0.01


def test_requests_that_wait_at_an_update_read_no_prefix_of_older_weights(host: EngineHost) -> None:
    """Twice as many requests as run at once share a prompt. Those that start after the update must not find the
    prefix that those before it left, although all were sent before the pause."""
    ids = prompt(90, 200)
    old, new = random_weights(host.model_path, 90), random_weights(host.model_path, 91)

    async def scenario() -> list[Completion]:
        await update(host.engine, old, 90)
        requests = [request(ids, max_tokens=600 if index < MAX_NUM_SEQS else 2) for index in range(2 * MAX_NUM_SEQS)]
        tasks = [asyncio.create_task(host.engine.generate(waiting)) for waiting in requests]
        await host.every_one_has(MAX_NUM_SEQS, 5)
        await update(host.engine, new, 91)
        return await asyncio.gather(*tasks)

    late = host.run(scenario())[MAX_NUM_SEQS:]
    for completion in late:
        assert [span.global_steps for span in completion.spans] == [91]
        expected = reference_logprobs(host, new, [*ids, *completion.token_ids.tolist()], start=len(ids))
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
    assert sum(completion.cached_tokens > 0 for completion in late) >= 1, "they do share the new prefix"


@pytest.mark.slow
@BOTH_SCHEDULERS
def test_keep_changes_nothing_of_what_is_generated(host: EngineHost) -> None:
    """Pause, the same weights again, resume: token by token and logprob by logprob what an unpaused run gives."""
    weights = random_weights(host.model_path, 100)
    requests = [request(prompt(index, 30), max_tokens=900) for index in range(6)]
    again = [replace(each, request_id=replace(each.request_id, attempt=1)) for each in requests]

    async def scenario(wanted: list[GenerationRequest], updates: int) -> list[Completion]:
        tasks = [asyncio.create_task(host.engine.generate(each)) for each in wanted]
        for index in range(updates):
            await host.every_one_has(6, 5 + 20 * index)
            await update(host.engine, weights, 101 + index)
        return await asyncio.gather(*tasks)

    host.run(update(host.engine, weights, 100))
    undisturbed = host.run(scenario(requests, updates=0))
    disturbed = host.run(scenario(again, updates=3))
    for calm, paused in zip(undisturbed, disturbed, strict=True):
        np.testing.assert_array_equal(calm.token_ids, paused.token_ids)
        np.testing.assert_allclose(calm.logprobs, paused.logprobs, atol=2e-5)
        assert len(paused.spans) == 4


def test_arguments_of_the_config_reach_vllm_over_our_defaults(engine_spec: EngineSpec) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rollout.engines.vllm.engine import _engine_args

    assert known_arguments() == {field.name for field in fields(AsyncEngineArgs) if field.name[0] != "_"}
    own_args = {"max_num_batched_tokens": 777, "enable_prefix_caching": False}
    arguments = _engine_args(replace(engine_spec, engine_args=own_args))
    assert (arguments.max_num_batched_tokens, arguments.enable_prefix_caching) == (777, False)
    assert arguments.attention_backend == "CPU_MLA"
    other = _engine_args(replace(engine_spec, engine_args={"attention_config": {"backend": "CPU_ATTN"}}))
    assert other.attention_backend is None, "vLLM takes no second one"
    parallel = replace(engine_spec, device="cuda", tensor_parallel_size=2)
    assert _engine_args(parallel).distributed_executor_backend == "mp", "in a placement group vLLM would take Ray's"


def test_a_cancelled_request_frees_its_seat(host: EngineHost) -> None:
    async def scenario() -> None:
        tasks = [
            asyncio.create_task(host.engine.generate(request(prompt(index, 10), max_tokens=900)))
            for index in range(MAX_NUM_SEQS)
        ]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await host.engine.generate(request(prompt(0, 10), max_tokens=2))
        assert host.engine._llm.output_counts() == {}

    host.run(scenario())


def test_wrong_weights_are_refused_before_the_pause(host: EngineHost) -> None:
    manifest = publish(random_weights(host.model_path, 120), 120)
    assert manifest.checksums is not None
    wrong = list(manifest.checksums[0])
    wrong[3] ^= 1
    try:
        with pytest.raises(Exception, match=rf"{manifest.tensors[3].name} came with checksums"):
            host.run(host.engine.stage(replace(manifest, checksums=(tuple(wrong),))))
        with pytest.raises(RuntimeError, match="version 121 cannot be swapped in: the engine runs"):
            host.run(host.engine.swap(121))
    finally:
        release()
    host.run(host.engine.generate(request(prompt(0, 10), max_tokens=2)))
