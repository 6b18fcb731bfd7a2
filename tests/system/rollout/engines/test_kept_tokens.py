"""What top-p, top-k and min-p leave travels with every token: the model's logprobs over it are the engine's."""

import asyncio
from typing import Any

import numpy as np
import pytest

from configs.rollout import MOST_KEPT
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest
from tests.support.adapters import distributions_of_spans
from tests.support.engines import BOTH_SCHEDULERS, EngineHost, prompt, request, update
from tests.support.kept import normalized, rows_of
from tests.support.weights import random_weights

TEMPERATURE, ATOL = 0.7, 1e-5
TRUNCATIONS = pytest.mark.parametrize(
    ("sampling", "first"),
    [
        pytest.param({"top_p": 0.9, "top_k": 20}, 400, id="top-p-and-top-k"),
        pytest.param({"top_p": 0.9}, 410, id="top-p-alone"),
        pytest.param({"top_k": 3}, 420, id="top-k"),
        pytest.param({"min_p": 0.2}, 430, id="min-p"),
    ],
)


@pytest.mark.slow
@BOTH_SCHEDULERS
@TRUNCATIONS
def test_logprobs_over_what_was_left_are_the_engines(host: EngineHost, sampling: dict[str, Any], first: int) -> None:
    """Two updates come meanwhile, and the driver reads what is known of the requests, from any token on."""
    first += 50 if host.engine._llm.vllm_config.scheduler_config.async_scheduling else 0
    weights = {version: random_weights(host.model_path, version) for version in (first, first + 1, first + 2)}
    prompts = [prompt(first + index, 8) for index in range(4)]
    pieces: list[tuple[RequestId, int, Completion]] = []

    async def scenario() -> list[Completion]:
        await update(host.engine, weights[first], first)
        tasks = [asyncio.create_task(host.engine.generate(each)) for each in requests]
        for number in (1, 2):
            await host.every_one_has(4, 30 * number)
            known = {each.request_id: 7 * number for each in requests}
            pieces.extend((name, known[name], piece) for name, piece in host.engine.partials(known).items())
            await update(host.engine, weights[first + number], first + number)
        return await asyncio.gather(*tasks)

    requests = [request(ids, max_tokens=200, temperature=TEMPERATURE, **sampling) for ids in prompts]
    completions = host.run(scenario())
    whole: dict[RequestId, list[list[int]]] = {}
    for each, completion in zip(requests, completions, strict=True):
        kept = completion.kept
        assert kept is not None and kept.is_known.all() and kept.counts.max() <= sampling.get("top_k", MOST_KEPT)
        assert kept.counts.min() >= 1 and kept.counts.mean() > 1.5
        truth = distributions_of_spans(host.model_path, weights, each.prompt_ids, completion, temperature=TEMPERATURE)
        np.testing.assert_allclose(normalized(truth, completion), completion.logprobs, atol=ATOL)
        whole[each.request_id] = rows_of(kept)
    assert len(pieces) == 8
    for name, start, piece in pieces:
        assert piece.kept is not None and piece.num_tokens == len(piece.kept.counts) > 0
        assert rows_of(piece.kept) == whole[name][start : start + piece.num_tokens]


def test_nothing_travels_where_nothing_is_left_out_or_nothing_is_trained(engine_host: EngineHost) -> None:
    host = engine_host
    host.run(update(host.engine, random_weights(host.model_path, 600), 600))
    evaluated = RequestId(ordinal=1, is_evaluation=True)

    async def scenario() -> list[Completion]:
        """All in one batch: vLLM computes as many logprobs for each as the one needs that asks for most."""
        truncated = request(prompt(1, 8), temperature=1.0, top_k=2, max_tokens=60)
        others = [
            request(prompt(2, 8), temperature=1.0, max_tokens=60),
            request(prompt(3, 8), temperature=0.0, top_p=0.5, max_tokens=60),
            GenerationRequest(request_id=evaluated, prompt_ids=prompt(4, 8), sampling=truncated.sampling),
        ]
        return await asyncio.gather(*map(host.engine.generate, [truncated, *others]))

    truncated, *others = host.run(scenario())
    assert truncated.kept is not None and set(truncated.kept.counts.tolist()) == {2}
    assert [other.kept for other in others] == [None] * 3


def test_what_the_engine_cannot_say_is_marked(engine_host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is as likely as every other: all are tied with the k-th."""
    host = engine_host
    flat = {name: 0 * weight for name, weight in random_weights(host.model_path, 610).items()}
    host.run(update(host.engine, flat, 610))
    completion = host.run(host.engine.generate(request(prompt(5, 8), temperature=1.0, top_k=4, max_tokens=20)))
    assert completion.kept is not None and not completion.kept.is_known.any() and len(completion.kept.counts) == 20
    assert not len(completion.kept.token_ids)
