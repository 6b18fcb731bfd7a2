"""Adapters flipped between two slots under captured CUDA graphs, and drafts beside them. Skipped without a GPU."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.engines.base import ServedAdapter
from rollout.types import Completion
from tests.support.adapters import factors, logprobs_of_spans, merged_weights, update_adapter
from tests.support.engines import hosted, prompt, request, tiny_gpu_spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.parametrize("speculative", [None, NGRAM])
def test_each_logprob_is_of_the_adapter_of_its_version(speculative: dict[str, object] | None, tmp_path: Path) -> None:
    """In bfloat16, as vLLM's LoRA kernels have no float32: near the right version's, far from others'."""
    path, adapter = tmp_path / "tiny", ServedAdapter(max_rank=8, layers=None)
    spec = tiny_gpu_spec(path, gpu_memory_utilization=0.5, adapter=adapter, speculative=speculative)
    adapters = {version: factors(path, version) for version in (1, 2, 3)}
    prompts = [prompt(index, 60) for index in range(4)]

    with hosted(spec) as host:

        async def scenario() -> list[Completion]:
            await update_adapter(host.engine, adapters[1], 1)
            asked = [request(ids, max_tokens=900, temperature=1.0) for ids in prompts]
            tasks = [asyncio.create_task(host.engine.generate(one)) for one in asked]
            for version in (2, 3):
                await host.every_one_has(4, 100 * (version - 1))
                await update_adapter(host.engine, adapters[version], version)
            return await asyncio.gather(*tasks)

        completions = host.run(scenario())
    weights = {version: merged_weights(path, own) for version, own in adapters.items()}
    swapped = {1: weights[2], 2: weights[3], 3: weights[1]}
    for ids, completion in zip(prompts, completions, strict=True):
        assert [span.global_steps for span in completion.spans] == [1, 2, 3]
        right, wrong = (
            np.abs(completion.logprobs - logprobs_of_spans(path, those, ids, completion)).mean()
            for those in (weights, swapped)
        )
        assert right < 0.1 and wrong > 0.5
