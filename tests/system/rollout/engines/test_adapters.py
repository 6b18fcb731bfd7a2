"""An adapter beside the weights that an engine loaded: each update into a second slot, which one flip makes live."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollout.engines.base import EngineSpec, ServedAdapter
from rollout.types import Completion
from tests.support.adapters import (
    assert_logprobs,
    factors,
    logprobs_of_spans,
    merged_weights,
    published,
    update_adapter,
)
from tests.support.engines import EngineHost, hosted, prompt, reference_logprobs, request
from tests.support.weights import publish, release
from weight_sync.adapter import factor_names
from weight_sync.protocol import Manifest

# Engines that serve adapters are started for this file alone.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapter_host(engine_spec: EngineSpec) -> Iterator[EngineHost]:
    with hosted(replace(engine_spec, adapter=ServedAdapter(max_rank=8, layers=None))) as host:
        yield host


def test_before_the_first_update_it_serves_the_weights_that_it_loaded(adapter_host: EngineHost) -> None:
    ids = prompt(1, 40)
    adapter_host.run(adapter_host.engine.tag_loaded(0))
    completion = adapter_host.run(adapter_host.engine.generate(request(ids, max_tokens=20)))
    loaded = merged_weights(adapter_host.model_path, {})
    expected = reference_logprobs(adapter_host, loaded, [*ids, *completion.token_ids.tolist()], start=40)
    np.testing.assert_allclose(completion.logprobs, expected, atol=3e-5)


def test_requests_in_flight_change_the_adapter_between_two_tokens_and_each_logprob_is_of_its_version(
    adapter_host: EngineHost,
) -> None:
    """Four requests over five updates; both slots are used more than once. The adapters have other layers each time:
    what one does not have must be gone."""
    host, path = adapter_host, adapter_host.model_path
    layers = [("_proj.weight",), ("q_proj.weight", "down_proj.weight"), ("up_proj.weight", "o_proj.weight")]
    adapters = {version: factors(path, version, ends=layers[version % 3]) for version in range(10, 16)}
    prompts = [prompt(index, 60) for index in range(2, 6)]

    async def scenario() -> list[Completion]:
        await update_adapter(host.engine, adapters[10], 10)
        tasks = [
            asyncio.create_task(host.engine.generate(request(ids, max_tokens=400, temperature=1.0))) for ids in prompts
        ]
        for version in range(11, 16):
            await host.every_one_has(4, 40 * (version - 10))
            await update_adapter(host.engine, adapters[version], version)
        return await asyncio.gather(*tasks)

    completions = host.run(scenario())
    weights = {version: merged_weights(path, own) for version, own in adapters.items()}
    for ids, completion in zip(prompts, completions, strict=True):
        assert [span.global_steps for span in completion.spans] == list(range(10, 16))
        assert_logprobs(completion, logprobs_of_spans(path, weights, ids, completion))
    shifted = replace(completions[0], spans=tuple(replace(s, start=max(0, s.start - 1)) for s in completions[0].spans))
    ends = [span.start for span in shifted.spans[1:]]
    wrong = replace(shifted, spans=tuple(replace(s, end=e) for s, e in zip(shifted.spans, [*ends, 400], strict=True)))
    error = np.abs(wrong.logprobs - logprobs_of_spans(path, weights, prompts[0], wrong)).max()
    assert error > 1e-2, "a border one token off would show"


def test_a_new_request_reads_no_cache_of_the_last_adapter(adapter_host: EngineHost) -> None:
    host, path, ids = adapter_host, adapter_host.model_path, prompt(7, 200)
    own = {version: factors(path, version) for version in (20, 21)}

    async def scenario() -> list[Completion]:
        completions = []
        for version in own:
            await update_adapter(host.engine, own[version], version)
            completions += [await host.engine.generate(request(ids, max_tokens=5)) for _ in range(2)]
        return completions

    completions = host.run(scenario())
    assert [completion.cached_tokens > 0 for completion in completions] == [False, True, False, True]
    for completion in completions:
        assert_logprobs(
            completion,
            logprobs_of_spans(
                path, {version: merged_weights(path, weights) for version, weights in own.items()}, ids, completion
            ),
        )


def test_what_is_refused_leaves_the_adapter_that_is_live(adapter_host: EngineHost) -> None:
    """Weights, a layer that the model does not have, and a rank above that of the slots."""
    host, path, ids = adapter_host, adapter_host.model_path, prompt(8, 30)
    own, weights = factors(path, 30), merged_weights(path, {})
    a_stray = dict.fromkeys(factor_names("model.layers.9.mlp.up_proj.weight"), torch.ones(4, 4))
    of_itself = "serves adapters on weights that it loaded itself, and"

    async def refused(manifest: Manifest, reason: str) -> None:
        with pytest.raises(Exception, match=reason):
            await host.engine.stage(manifest)

    async def scenario() -> Completion:
        await update_adapter(host.engine, own, 30)
        await refused(publish(own, 31), f"{of_itself} the version says that it is none")
        await refused(published(weights | own, 31), f"{of_itself} model.* is none")
        await refused(published(own | a_stray, 31), "vLLM has no LoRA layer for model.layers.9.mlp.up_proj")
        await refused(published(factors(path, 31, rank=9), 31), "staging failed: RuntimeError: The size of tensor")
        answer = await host.engine.generate(request(ids, max_tokens=20))
        await update_adapter(host.engine, factors(path, 32), 32)
        return answer

    completion = host.run(scenario())
    release()
    assert_logprobs(completion, logprobs_of_spans(path, {30: merged_weights(path, own)}, ids, completion))
