"""One trajectory out of several requests is the trajectory that one request would have given."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import PauseMode
from rollout.replica.continuation import generate_in_parts
from rollout.replica.replica import RolloutReplica
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest, SamplingParams, VersionSpan
from tests.support.fakes import make_completion, make_request, now, run_virtual, start_group, update
from tests.support.replicas import assert_serves, on_replica

SAMPLING = SamplingParams(
    temperature=0.7, top_p=0.9, top_k=5, max_tokens=10, stop_token_ids=(3,), stop=("END",), seed=11
)
REQUEST = GenerationRequest(request_id=RequestId(ordinal=3), prompt_ids=(1, 2), sampling=SAMPLING)


def sampling_after(num_tokens: int) -> SamplingParams:
    """A part draws other random numbers than the one before it."""
    if num_tokens == 0:
        return SAMPLING
    return replace(SAMPLING.reseeded(num_tokens), max_tokens=SAMPLING.max_tokens - num_tokens)


class Engine:
    """Answers with the given completions, one after the other. Notes what it was asked."""

    def __init__(self, *completions: Completion):
        self.requests: list[GenerationRequest] = []
        self._completions = iter(completions)

    async def generate(self, request: GenerationRequest, before: Completion | None) -> Completion:
        self.requests.append(request)
        return next(self._completions)

    def go(self, interrupted: bool = True) -> tuple[Completion, int]:
        return run_virtual(generate_in_parts(REQUEST, self.generate, lambda request_id: interrupted))


@given(
    versions=st.lists(st.integers(0, 3), min_size=1, max_size=10).map(sorted),
    cuts=st.lists(st.integers(0, 10), max_size=3),
    finish_reason=st.sampled_from(["stop", "length"]),
)
def test_however_it_is_cut_it_is_the_same_trajectory(versions: list[int], cuts: list[int], finish_reason: str) -> None:
    """Cut it also before its first token, after its last but one, and twice at the same place."""
    tokens = list(range(20, 20 + len(versions)))
    whole = make_completion(tokens, versions, finish_reason)
    ends = [*sorted(min(cut, len(tokens) - 1) for cut in cuts), len(tokens)]
    pieces = list(zip([0, *ends[:-1]], ends, strict=True))
    engine = Engine(
        *(
            make_completion(tokens[start:end], versions[start:end], finish_reason if end == len(tokens) else "abort")
            for start, end in pieces
        )
    )
    completion, parts = engine.go()
    assert parts == len(pieces)
    assert completion.token_ids.tolist() == tokens and completion.logprobs.tolist() == whole.logprobs.tolist()
    assert (completion.spans, completion.finish_reason) == (whole.spans, finish_reason)
    for request, (start, _) in zip(engine.requests, pieces, strict=True):
        assert request.prompt_ids == (1, 2, *tokens[:start]) and request.num_sampled == start
        assert request.sampling == sampling_after(start)
    assert len({request.request_id for request in engine.requests}) == parts
    assert [request.is_continuation for request in engine.requests] == [False] + [True] * (parts - 1)


def test_an_abort_that_is_the_users_ends_it_with_the_tokens_of_all_parts() -> None:
    completions = [make_completion([token], [version], "abort") for token, version in ((4, 7), (5, 8))]
    engine = Engine(*completions)
    interrupted = iter([True, False])
    completion, parts = run_virtual(generate_in_parts(REQUEST, engine.generate, lambda name: next(interrupted)))
    assert (completion.token_ids.tolist(), completion.finish_reason, parts) == ([4, 5], "abort", 2)
    assert completion.spans == (VersionSpan(0, 1, 7), VersionSpan(1, 2, 8))
    completion, parts = Engine(make_completion([], [], "abort")).go(interrupted=False)
    assert (len(completion.token_ids), completion.spans, completion.finish_reason, parts) == (0, (), "abort", 1)


def test_an_abort_with_the_last_token_allowed_is_the_end() -> None:
    """A request for no more tokens would be refused."""
    engine = Engine(make_completion(range(6), [7] * 6, "abort"), make_completion(range(4), [8] * 4, "abort"))
    completion, parts = engine.go()
    assert (len(completion.token_ids), completion.finish_reason, parts) == (10, "length", 2)
    assert completion.spans == (VersionSpan(0, 6, 7), VersionSpan(6, 10, 8))


# -- a replica with pause_mode=abort -----------------------------------------------------------------------------------


@on_replica(pause_mode=PauseMode.abort)
async def test_for_an_engine_that_can_only_abort_a_trajectory_is_continuation_from_its_tokens(
    replica: RolloutReplica,
) -> None:
    group = start_group(replica, 7, 3)
    for version, moment in ((1, 1.5), (2, 4.25)):
        await asyncio.sleep(moment - now())
        await update(replica, version)
    first, second = await group
    assert first.spans == (VersionSpan(0, 1, 0), VersionSpan(1, 3, 1), VersionSpan(3, 7, 2))
    assert second.spans == (VersionSpan(0, 1, 0), VersionSpan(1, 3, 1))
    assert first.token_ids.tolist() == [0, 1, 1, 2, 2, 2, 2] and len(first.logprobs) == 7
    assert (first.finish_reason, second.finish_reason) == ("stop", "stop")
    stats = await replica.stats()
    assert (stats["trajectories"], stats["aborted"], stats["tokens"]) == (2, 0, 10)
    assert (stats["continued"], stats["engine_requests"], stats["prompt_tokens"]) == (3, 5, 4)
    await assert_serves(replica, 2)


@on_replica(max_num_seqs=1, pause_mode=PauseMode.abort)
async def test_what_an_update_interrupted_is_continuation_before_those_that_wait_for_a_seat(
    replica: RolloutReplica,
) -> None:
    group = start_group(replica, 4, 2)
    for version, moment in ((1, 1.5), (2, 4.25)):
        await asyncio.sleep(moment - now())
        await update(replica, version)
    first, second = await group
    assert first.spans == (VersionSpan(0, 1, 0), VersionSpan(1, 3, 1), VersionSpan(3, 4, 2))
    assert second.spans == (VersionSpan(0, 2, 2),)
    assert (await replica.stats())["continued"] == 2, "and those that wait are left alone"


@on_replica(pause_mode=PauseMode.abort)
async def test_a_trajectory_that_went_on_after_an_update_can_be_aborted_by_its_id_and_so_can_the_next_of_that_id(
    replica: RolloutReplica,
) -> None:
    group = start_group(replica, 9)
    await asyncio.sleep(1.5)
    await update(replica, 1)
    for seconds in (2.5, 1.5):
        await asyncio.sleep(seconds)
        assert await replica.abort({"0-0"}) == ["0-0"]
        assert (await group)[0].finish_reason == "abort"
        group = start_group(replica, 9)
    assert (await replica.stats())["continued"] == 1
    group.cancel()


@on_replica(pause_mode=PauseMode.abort)
async def test_what_an_update_ends_for_good_is_not_ended_again_by_a_client(replica: RolloutReplica) -> None:
    """The request of an HTTP client reaches the engine by itself, and does not continue."""
    http = asyncio.create_task(replica._engine.generate(make_request("cmpl-7", 400)))
    group = start_group(replica, 9)
    await asyncio.sleep(4.5)
    await update(replica, 1)
    assert (await http).finish_reason == "abort"
    assert await replica.abort() == ["0-0"] and (await group)[0].finish_reason == "abort"
    assert await replica.abort() == []


@pytest.mark.parametrize("names", [None, {"0-0", "0-1"}], ids=["all", "by name"])
@pytest.mark.parametrize("ticks", [*range(12), 20, 40])
@pytest.mark.parametrize("mode", [PauseMode.keep, PauseMode.abort])
def test_what_a_client_aborts_at_any_moment_of_an_update_ends(
    mode: PauseMode, ticks: int, names: set[str] | None
) -> None:
    async def test(replica: RolloutReplica) -> None:
        group = start_group(replica, 400, 400)
        await asyncio.sleep(4.5)
        updating = asyncio.create_task(update(replica, 1))
        for _ in range(ticks):
            await asyncio.sleep(0)
        assert sorted(await replica.abort(names)) == ["0-0", "0-1"]
        await updating
        completions = await group
        assert [completion.finish_reason for completion in completions] == ["abort", "abort"]
        assert now() < 20 and await replica.abort() == []

    on_replica(pause_mode=mode)(test)()


@pytest.mark.parametrize(("mode", "tokens_before"), [(PauseMode.keep, 15), (PauseMode.abort, 14)])
def test_an_update_while_a_pause_waits_costs_no_trajectory_anything(mode: PauseMode, tokens_before: int) -> None:
    async def test(replica: RolloutReplica) -> None:
        group = start_group(replica, 900)
        await asyncio.sleep(4.5)
        pausing = asyncio.create_task(replica.pause(PauseMode.wait, timeout_s=1e4))
        await asyncio.sleep(10)
        await update(replica, 1)
        await pausing
        assert replica.is_paused()
        await replica.resume()
        assert (await group)[0].spans == (VersionSpan(0, tokens_before, 0), VersionSpan(tokens_before, 900, 1))

    on_replica(pause_mode=mode)(test)()


# -- from what was sampled elsewhere -----------------------------------------------------------------------------------


def test_a_request_is_continuation_from_what_was_sampled_elsewhere() -> None:
    engine = Engine(make_completion([6], [8], "abort"), make_completion([7], [9], "stop"))
    request = replace(REQUEST, partial=make_completion([4, 5], [7, 7], "", cached_tokens=2))
    completion, sent = run_virtual(generate_in_parts(request, engine.generate, lambda name: True))
    assert completion.token_ids.tolist() == [4, 5, 6, 7] and sent == 2
    assert completion.spans == (VersionSpan(0, 2, 7), VersionSpan(2, 3, 8), VersionSpan(3, 4, 9))
    assert (completion.finish_reason, completion.cached_tokens) == ("stop", 2)
    assert [str(sent.request_id) for sent in engine.requests] == ["3-0", "3-0+part1"]
    assert [sent.prompt_ids for sent in engine.requests] == [(1, 2, 4, 5), (1, 2, 4, 5, 6)]
    assert [sent.sampling for sent in engine.requests] == [sampling_after(2), sampling_after(3)]
