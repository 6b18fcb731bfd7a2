"""Versions of tokens where they are hard to get right: KV pressure, split prefills, requests taken back, recomputation;
and ours held against the engine's own."""

import asyncio
import random
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from rollout.engines.base import EngineSpec
from rollout.types import Completion
from tests.support.engines import (
    BOTH_SCHEDULERS,
    MAX_NUM_SEQS,
    EngineHost,
    assert_tokens_equal_tags,
    hosted,
    pause,
    prompt,
    reference_logprobs,
    request,
    resume,
    update,
)
from tests.support.weights import FIRST_TOKEN, emitting_weights, publish, random_weights, release


@pytest.fixture(scope="module")
def small_host(engine_spec: EngineSpec) -> Iterator[EngineHost]:
    with hosted(replace(engine_spec, kv_cache_bytes=1 << 20, max_model_len=512, log_stats=True)) as host:
        yield host


async def under_updates(
    host: EngineHost, versions: range, every_s: float, *calls: Coroutine[Any, Any, Completion]
) -> Any:
    async def updates() -> None:
        for version in versions:
            await asyncio.sleep(every_s)
            await update(host.engine, emitting_weights(host.model_path, FIRST_TOKEN + version), version)

    updating = asyncio.create_task(updates())
    completions = await asyncio.gather(*calls)
    await updating
    return completions


def num_preemptions() -> float:
    """Requests that an engine of this process, the one that measures itself, put out of the KV cache and back."""
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    (total,) = [sample.value for sample in samples if sample.name == "vllm:num_preemptions_total"]
    return total


@pytest.mark.slow
def test_tags_are_exact_when_the_kv_cache_is_short(small_host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 requests want three times the cache: the engine preempts some and leaves others without a prefill, which a
    pause takes back after its grace and submits again, with the new salt."""
    monkeypatch.setattr(small_host.engine._llm, "prefill_grace_s", 0.1)
    host, chance = small_host, random.Random(3)
    requests = [request(prompt(index, 230), max_tokens=chance.randint(60, 200)) for index in range(MAX_NUM_SEQS)]

    async def scenario() -> list[Completion]:
        await update(host.engine, emitting_weights(host.model_path, FIRST_TOKEN), 0)
        return await under_updates(host, range(1, 6), 0.15, *(host.engine.generate(each) for each in requests))

    preempted_before = num_preemptions()
    completions = host.run(scenario())
    for completion in completions:
        assert_tokens_equal_tags(completion)
    assert num_preemptions() > preempted_before
    assert [len(completion.token_ids) for completion in completions] == [each.sampling.max_tokens for each in requests]
    assert any(len(completion.spans) > 1 for completion in completions)
    gauges = host.engine.gauges()
    assert gauges["restarted_requests"] > 0, "some were taken back and submitted again"
    assert gauges["engine_requests"] == MAX_NUM_SEQS + gauges["restarted_requests"]


@pytest.mark.slow
@BOTH_SCHEDULERS
def test_a_prefill_split_over_steps_is_of_one_version(host: EngineHost) -> None:
    """More prompt tokens than one step takes, and a pause in the midst of them: the logprob of the first token is that
    of weights which saw the whole prompt."""
    old, new = random_weights(host.model_path, 130), random_weights(host.model_path, 131)
    per_step = host.engine._llm.vllm_config.scheduler_config.max_num_batched_tokens
    # In the order they came, and as much as a step takes of each: the first steps end in the midst of a prompt.
    assert 900 < per_step < 6 * 900 and per_step % 900 and 2 * per_step % 900

    async def scenario(prompts: list[tuple[int, ...]]) -> tuple[list[Completion], list[int]]:
        await update(host.engine, old, 130)
        manifest = publish(new, 131)
        await host.engine.stage(manifest)
        requests = [request(ids, max_tokens=120) for ids in prompts]
        tasks = [asyncio.create_task(host.engine.generate(each)) for each in requests]
        while not (counts := host.engine._llm.output_counts()) or not any(counts.values()):
            await asyncio.sleep(0)
        await pause(host.engine)
        under_way = [index for index, each in enumerate(requests) if counts.get(str(each.request_id)) == 0]
        await host.engine.swap(131)
        await resume(host.engine)
        release()
        return await asyncio.gather(*tasks), under_way

    for attempt in range(5):
        prompts = [prompt(1000 + 100 * attempt + index, 900) for index in range(12)]
        completions, under_way = host.run(scenario(prompts))
        if under_way and all(completion.spans[-1].global_steps == 131 for completion in completions):
            break  # otherwise this process stood still until the first were done, and the pause came too late
    assert 2 <= len(under_way) < len(prompts), "some had a token when the pause came, and others no whole prefill"
    for ids, completion in zip(prompts, completions, strict=True):
        assert [span.global_steps for span in completion.spans] == [130, 131], "the freeze waits for every prefill"
        first = completion.spans[0]
        expected = reference_logprobs(host, old, [*ids, *completion.token_ids.tolist()], start=len(ids))
        np.testing.assert_allclose(completion.logprobs[: first.end], expected[: first.end], atol=3e-5)


@pytest.mark.slow
def test_recomputed_kv_is_of_the_new_weights_alone(host: EngineHost) -> None:
    """Tokens after an update with in_flight_kv=recompute are those of weights that saw the whole sequence. With the
    kept KV of older weights they are not, which shows that the check can tell."""
    old, new = random_weights(host.model_path, 140), random_weights(host.model_path, 141)
    ids = prompt(140, 60)
    for version, clear_cache in ((140, True), (150, False)):

        async def scenario(version: int = version, clear_cache: bool = clear_cache) -> Completion:
            await update(host.engine, old, version)
            task = asyncio.create_task(host.engine.generate(request(ids, max_tokens=900)))
            await host.every_one_has(1, 20)
            await update(host.engine, new, version + 1, clear_cache)
            return await task

        completion = host.run(scenario())
        assert [span.global_steps for span in completion.spans] == [version, version + 1]
        boundary = completion.spans[1].start
        expected = reference_logprobs(host, new, [*ids, *completion.token_ids.tolist()], start=len(ids))
        error = np.abs(completion.logprobs[boundary:] - expected[boundary:]).max()
        assert error < 3e-5 if clear_cache else error > 1e-2
