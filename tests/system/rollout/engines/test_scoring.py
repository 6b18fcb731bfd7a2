"""The real vLLM engine as a teacher: the logprobs of given tokens are those of a plain forward pass."""

import asyncio

import numpy as np

from tests.support.engines import EngineHost, pause, prompt, reference_logprobs, request, resume, update
from tests.support.weights import random_weights

VERSION = 70


def test_logprobs_of_given_tokens_are_those_of_the_weights(host: EngineHost) -> None:
    """Many at once and of many lengths, so that some are read in pieces; beside requests that generate from the same
    prefix, whose cache they must not read; and after a pause in their midst."""
    weights = random_weights(host.model_path, seed=VERSION)
    tokens = [prompt(7, 300)[:length] for length in (2, 3, 33, 64, 65, 200, 300)] + [prompt(8, 900), prompt(9, 1000)]

    async def scenario() -> list[np.ndarray]:
        await update(host.engine, weights, VERSION)
        before = await host.engine.generate(request(tokens[5], temperature=0.7, max_tokens=3))
        others = [host.engine.generate(request(ids, temperature=0.7, max_tokens=20)) for ids in tokens[:7]]
        scores = [host.engine.score(np.array(ids, np.int32), f"score-{n}") for n, ids in enumerate(tokens)]
        running = asyncio.gather(*others, *scores)
        await asyncio.sleep(0.05)
        await pause(host.engine)
        await resume(host.engine)
        assert before.num_tokens == 3
        return (await running)[7:]

    for ids, logprobs in zip(tokens, host.run(scenario()), strict=True):
        assert logprobs.dtype == np.float32 and len(logprobs) == len(ids) - 1
        np.testing.assert_allclose(logprobs, reference_logprobs(host, weights, list(ids), start=1), atol=3e-5)
