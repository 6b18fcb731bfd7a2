"""Counts of the tokens that a real engine samples, whoever asked for them: by them a replica is known to be alive."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rollout.engines.vllm.client import GatedLLM
from tests.support.engines import EngineHost

PROMPT: Any = {"prompt_token_ids": [5, 6, 7]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_every_token_of_a_client_is_counted_once_while_it_comes(
    engine_host: EngineHost, kind: RequestOutputKind
) -> None:
    """The client asks for two samples, streamed or not, as one over HTTP does."""
    params = SamplingParams(n=2, max_tokens=600, ignore_eos=True, detokenize=False, output_kind=kind)
    engine = engine_host.engine

    async def scenario() -> None:
        before = engine.usage.tokens
        seen = [0]

        async def watch() -> None:
            while True:
                seen.append(engine.usage.tokens - before)
                assert engine.usage.running == 1
                await asyncio.sleep(0.002)

        watching = asyncio.create_task(watch())
        async for _ in engine._llm.generate(PROMPT, params, f"usage-{kind.name}"):
            pass
        watching.cancel()
        assert engine.usage.tokens - before == 2 * 600 and engine.usage.running == 0
        assert seen == sorted(seen) and len(set(seen)) > 5, "it grows with every token, before the answer is there"

    engine_host.runner.run(scenario())


def test_two_requests_may_have_one_id_and_are_aborted_by_it(engine_host: EngineHost) -> None:
    """An HTTP client sends its request again, with the same X-Request-Id, while the first is under way."""
    params = SamplingParams(max_tokens=900, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA)
    engine = engine_host.engine

    async def scenario() -> None:
        before, ended, num_tokens = engine.usage.tokens, [], 0

        async def ask() -> None:
            nonlocal num_tokens
            async for output in engine._llm.generate(PROMPT, params, "cmpl-twice-0"):
                num_tokens += len(output.outputs[0].token_ids)
            ended.append(output.outputs[0].finish_reason)

        asking = [asyncio.create_task(ask()) for _ in range(2)]
        while engine.usage.tokens - before < 50:
            await asyncio.sleep(0.005)
        assert engine.running == ["cmpl-twice-0"] * 2
        assert await engine.abort({"twice"}) == ["cmpl-twice-0"] * 2
        await asyncio.gather(*asking)
        assert ended == ["abort", "abort"] and engine.running == []
        assert engine.usage.tokens - before == num_tokens
        assert engine._llm.client_ids == {}

    engine_host.runner.run(scenario())


def test_what_has_begun_is_not_taken_back_for_a_sample_of_it_that_has_not() -> None:
    """Its client has tokens already: to submit it again would send them twice."""

    def sample(request_id: str, is_prefilling: bool) -> SimpleNamespace:
        return SimpleNamespace(external_req_id=request_id, is_prefilling=is_prefilling)

    samples = [sample("a", False), sample("a", True), sample("b", True), sample("b", True), sample("c", False)]
    llm: Any = SimpleNamespace(output_processor=SimpleNamespace(request_states=dict(enumerate(samples))))
    assert GatedLLM._not_prefilled(llm) == ["b"]
