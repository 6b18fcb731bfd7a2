"""The KV cache of the simulated engine: it never holds more than fits, and an engine loses no token by it."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engines.simulated import simulated_manifest
from rollout.engines.virtual_clock import run_virtual
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest, SamplingParams
from scripts.simulate.engine import ProfiledEngine
from scripts.simulate.kv_cache import KvCache, KvSegment
from scripts.simulate.machine import Machine
from tests.support.profiles import PROFILE

PROMPT = 100


def test_what_requests_share_lies_there_once_and_stays_while_there_is_room() -> None:
    kv = KvCache(1000)
    first, second = [("prompt", 300), ("a", 100)], [("prompt", 300), ("b", 100)]
    assert kv.begin(first) == 0 and kv.room == 600
    assert kv.needed(second) == 100
    assert kv.begin(second) == 300 and kv.room == 500
    kv.sample(50)
    kv.end(first, 50)
    assert kv.room == 600, "b still holds the prompt"
    assert kv.begin([("prompt", 300), ("a", 200)]) == 450, "with what it had sampled"
    kv.end([("prompt", 300), ("a", 200)], 0)
    kv.end(second, 0)
    assert kv.begin([("c", 700)]) == 0 and kv.room == 300
    assert kv.begin([("prompt", 300)]) == 0, "it was left for as long as the others, and came first"


def test_what_older_weights_computed_is_of_no_use() -> None:
    kv = KvCache(1000)
    kv.begin([("a", 100)])
    kv.end([("a", 100)], 0)
    kv.forget()
    assert kv.begin([("a", 100)]) == 0
    kv.end([("a", 100)], 0, is_of_use=False)
    assert kv.begin([("a", 100)]) == 0 and kv.room == 900


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(1, 60), st.integers(0, 30)), max_size=60))
def test_it_counts_all_that_is_held_and_never_has_more_than_its_capacity(
    requests: list[tuple[int, int, int, int]],
) -> None:
    kv, held = KvCache(200), dict[int, tuple[Sequence[KvSegment], int]]()
    for who, shared, tokens, sampled in requests:
        if who in held:
            segments, before = held.pop(who)
            kv.end(segments, before)
        else:
            segments = [(("prompt", shared), 20), (("own", who), tokens)]
            if kv.needed(segments) + sampled > kv.room:
                continue
            cached = kv.begin(segments)
            assert 0 <= cached <= 20 + tokens
            kv.sample(sampled)
            held[who] = segments, sampled
        names = {name: tokens for segments, _ in held.values() for name, tokens in segments}
        assert kv.room == 200 - sum(names.values()) - sum(sampled for _, sampled in held.values())
        assert sum(kv._idle.values()) == kv._num_idle <= kv.room


# -- an engine with a small one ----------------------------------------------------------------------------------------


def request(ordinal: int, tokens: int, prompt: int = PROMPT, turn: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(ordinal=ordinal, turn=turn),
        prompt_ids=(0,) * prompt,
        sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
    )


def make_engine(kv_tokens: int, leap_s: float = math.inf) -> ProfiledEngine:
    profile = replace(PROFILE, kv_tokens=kv_tokens)
    return ProfiledEngine(profile, Machine(profile, 1), 16, leap_s)


@pytest.mark.parametrize("leap_s", [math.inf, 0.2])
def test_one_that_was_preempted_goes_on_from_its_tokens_and_each_is_of_the_weights_that_sampled_it(
    leap_s: float,
) -> None:
    async def main(kv_tokens: int) -> tuple[list[Completion], int, float]:
        engine = make_engine(kv_tokens, leap_s)
        await engine.tag_loaded(0)
        answers = [asyncio.create_task(engine.generate(request(ordinal, 200 + ordinal))) for ordinal in range(8)]
        await asyncio.sleep(1.0)
        for version in (1, 2):
            await engine.stage(simulated_manifest(version))
            await engine.freeze(clear_cache=False)
            await engine.swap(version)
            await engine.thaw()
            await asyncio.sleep(0.5)
        completions = await asyncio.gather(*answers)
        return completions, engine.num_preempted, asyncio.get_running_loop().time()

    completions, num_preempted, seconds = run_virtual(main(1200))
    roomy, none_preempted, fewer_seconds = run_virtual(main(100_000))
    assert num_preempted > 0 == none_preempted and seconds > fewer_seconds
    for ordinal, completion in enumerate(completions):
        assert completion.num_tokens == roomy[ordinal].num_tokens == 200 + ordinal
        assert [span.start for span in completion.spans] == [0, *(span.end for span in completion.spans)][:-1]
        assert completion.spans[-1].end == completion.num_tokens
        versions = [span.global_steps for span in completion.spans]
        assert versions == sorted(set(versions)), "versions ascend, and no two spans of one stand side by side"


def test_the_next_turn_of_an_episode_computes_only_what_is_new_while_its_cache_is_there() -> None:
    async def main(others: int) -> int:
        engine = make_engine(2000)
        await engine.tag_loaded(0)
        await engine.generate(request(0, 50))
        for ordinal in range(1, 1 + others):
            await engine.generate(request(ordinal, 50, prompt=900))
        return (await engine.generate(request(0, 10, prompt=PROMPT + 50 + 30, turn=1))).cached_tokens

    assert run_virtual(main(others=1)) == PROMPT + 50
    assert run_virtual(main(others=2)) == 0, "the others needed the room"


def test_an_aborted_request_has_the_tokens_that_it_sampled() -> None:
    async def main() -> tuple[Completion, Completion]:
        engine = make_engine(0, leap_s=0.1)
        await engine.tag_loaded(0)
        answer = asyncio.create_task(engine.generate(request(0, 1000)))
        await asyncio.sleep(2.0)
        known = engine.partials({RequestId(ordinal=0): 3})[RequestId(ordinal=0)]
        await engine.abort(None)
        return known, await answer

    known, answer = run_virtual(main())
    assert 0 < known.num_tokens + 3 <= answer.num_tokens < 1000 and answer.finish_reason == "abort"
    assert known.spans[0].start == 0 and answer.spans[-1].end == answer.num_tokens
