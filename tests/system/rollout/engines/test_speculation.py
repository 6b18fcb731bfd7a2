"""Speculative decoding by n-grams: several tokens a step, each as likely as without drafts, with the model's
own logprob and the version that sampled it."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rollout.engines.base import EngineSpec
from rollout.types import Completion
from tests.support.adapters import assert_logprobs, distributions_of_spans, logprobs_of_spans
from tests.support.engines import EngineHost, assert_tokens_equal_tags, hosted, prompt, request, update
from tests.support.weights import FIRST_TOKEN, emitting_weights, random_weights

pytestmark = pytest.mark.slow

COLD, ATOL = 0.2, 2e-4
"""A temperature at which random weights repeat themselves. It makes errors of logits five times as large."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def drafting_host(engine_spec: EngineSpec) -> Iterator[EngineHost]:
    with hosted(replace(engine_spec, speculative=NGRAM)) as host:
        yield host


def drafts(host: EngineHost) -> tuple[float, float]:
    """(drafted, accepted) since the start."""
    gauges = host.engine.gauges()
    return gauges["drafted_tokens"], gauges["accepted_tokens"]


def test_tags_are_exact_where_a_step_samples_several_tokens(drafting_host: EngineHost) -> None:
    """Version v always emits token 40 + v: nearly all drafts are accepted, until an update makes all of them wrong."""
    host = drafting_host

    async def scenario() -> list[Completion]:
        await update(host.engine, emitting_weights(host.model_path, FIRST_TOKEN), 0)
        requests = [request(prompt(index, 30), max_tokens=900) for index in range(8)]
        tasks = [asyncio.create_task(host.engine.generate(each)) for each in requests]
        for version in range(1, 5):
            await host.every_one_has(8, 150 * version)
            await update(host.engine, emitting_weights(host.model_path, FIRST_TOKEN + version), version)
        return await asyncio.gather(*tasks)

    before = drafts(host)
    completions = host.run(scenario())
    for completion in completions:
        assert_tokens_equal_tags(completion)
        assert [span.global_steps for span in completion.spans] == [0, 1, 2, 3, 4]
        assert len(completion.token_ids) == 900
    drafted, accepted = (now - then for now, then in zip(drafts(host), before, strict=True))
    assert 0.9 < accepted / drafted < 1
    assert accepted > 0.7 * 8 * 900, "four of five tokens were drafts"


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logprobs_are_the_models_at_the_temperature_whatever_was_drafted(
    drafting_host: EngineHost, top_p: float
) -> None:
    """Two updates come meanwhile, with the KV cache of rejected drafts in between; plain forwards are the truth."""
    host, path, first = drafting_host, drafting_host.model_path, 100 if top_p == 1 else 200
    weights = {first + index: random_weights(path, first + index) for index in range(3)}
    prompts = [prompt(first + index, 8) * 6 for index in range(6)]

    async def scenario() -> list[Completion]:
        await update(host.engine, weights[first], first)
        sent = [request(ids, max_tokens=900, temperature=COLD, top_p=top_p) for ids in prompts]
        tasks = [asyncio.create_task(host.engine.generate(each)) for each in sent]
        for number in (1, 2):
            await host.every_one_has(6, 40 * number)
            await update(host.engine, weights[first + number], first + number)
        return await asyncio.gather(*tasks)

    before = drafts(host)
    completions = host.run(scenario())
    drafted, accepted = (now - then for now, then in zip(drafts(host), before, strict=True))
    assert 100 < accepted < 0.95 * drafted, "some were accepted, and some not"
    surprise = Surprise()
    for ids, completion in zip(prompts, completions, strict=True):
        assert [span.global_steps for span in completion.spans] == [*weights]
        every = distributions_of_spans(path, weights, ids, completion, temperature=COLD)
        expected = np.take_along_axis(every, completion.token_ids[:, None], 1)[:, 0]
        if top_p == 1:
            assert_logprobs(completion, expected, ATOL)
            surprise.add([*ids, *completion.token_ids.tolist()], len(ids), np.exp(every))
        else:
            change = completion.logprobs - expected  # all that is left out makes what is kept more likely
            assert (change > -ATOL).all() and (change < -np.log(top_p) + ATOL).all() and change.max() > 1e-3
    if top_p == 1:
        assert abs(surprise.z) < 4, "what was there before comes as often as the model says"


class Surprise:
    """A count of tokens that follow their predecessor as the last time, which is what n-grams draft, against how
    often they should, in standard deviations."""

    def __init__(self) -> None:
        self.excess = self.variance = 0.0

    def add(self, tokens: list[int], start: int, probabilities: np.ndarray) -> None:
        followed: dict[int, int] = {}
        for place in range(1, len(tokens)):
            if place >= start and (draft := followed.get(tokens[place - 1])) is not None:
                chance = float(probabilities[place - start, draft])
                self.excess += (tokens[place] == draft) - chance
                self.variance += chance * (1 - chance)
            followed[tokens[place - 1]] = tokens[place]

    @property
    def z(self) -> float:
        assert self.variance > 20
        return self.excess / self.variance**0.5


def test_greedy_answers_are_the_most_likely_tokens(drafting_host: EngineHost) -> None:
    host, path, ids = drafting_host, drafting_host.model_path, prompt(300, 5) * 8
    weights = random_weights(path, 300)
    host.run(update(host.engine, weights, 300))
    before = drafts(host)
    completion = host.run(host.engine.generate(request(ids, max_tokens=200)))
    assert drafts(host)[1] > before[1]
    cold = logprobs_of_spans(path, {300: weights}, ids, completion, temperature=1e-3)
    assert np.exp(cold).min() > 0.49, "no other token is more likely"
