"""What a replica reports of its requests is a beginning of their answers, whatever report gets lost."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import PauseMode
from rollout.engines.base import EngineDiedError
from rollout.progress import Attempt, Progress, prompt_checksum
from rollout.replica.replica import RolloutReplica
from rollout.request_ids import RequestId
from rollout.types import Completion
from tests.support.fakes import ClockedEngine, make_completion, make_request, now, update
from tests.support.replicas import on_replica

FIRST, SECOND = RequestId(ordinal=3), RequestId(ordinal=3, episode=1)
RETRIED = RequestId(ordinal=3, attempt=1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    moments=st.lists(st.tuples(st.floats(0, 12), st.booleans()), max_size=8).map(sorted),
    updates=st.lists(st.floats(0.1, 9), max_size=3).map(sorted),
    mode=st.sampled_from([PauseMode.keep, PauseMode.abort]),
)
def test_what_is_told_is_a_beginning_of_the_answer(
    lengths: list[int], moments: list[tuple[float, bool]], updates: list[float], mode: PauseMode
) -> None:
    """Through updates that freeze or abort, on an engine with fewer seats than requests, with reports that get lost."""
    progress = Progress()
    progress.begin(3, Attempt(), "r")

    async def ask(replica: RolloutReplica) -> None:
        for moment, arrives in moments:
            await asyncio.sleep(max(0.0, moment - now()))
            report = await replica.progress(progress.known("r"))
            assert report.tokens >= sum(progress.known("r").values())
            if arrives:
                progress.take("r", report)

    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        async def keep_updating() -> None:
            for version, moment in enumerate(updates, start=1):
                await asyncio.sleep(max(0.0, moment - now()))
                await update(replica, version)

        requests = [make_request(f"3-{index}", length) for index, length in enumerate(lengths)]
        asking = asyncio.gather(ask(replica), keep_updating())
        completions = await replica.generate_group(requests)
        await asking
        for index, completion in enumerate(completions):
            told = progress.partials(3).get((index, 0))
            if told is None:
                continue
            known = len(told.completion.token_ids)
            assert told.completion.token_ids.tolist() == completion.token_ids[:known].tolist()
            assert told.prompt_checksum == prompt_checksum((1, 2))
            rest = completion.after(known)
            assert Completion.concatenate([told.completion, rest]).spans == completion.spans
            if told.completion.finish_reason:
                assert known == len(completion.token_ids) and told.completion.finish_reason == "stop"
        assert (await replica.progress({})).tokens == sum(lengths)

    on_replica(max_num_seqs=2, pause_mode=mode)(test)()


@on_replica()
async def test_the_end_of_a_request_is_told_twice_and_then_forgotten(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    await replica.generate_group([make_request("3-0", 1)])
    assert (await replica.progress({})).deltas == (), "nobody had asked"
    group = asyncio.create_task(replica.generate_group([make_request("3-0", 1), make_request("3-1", 4)]))
    await asyncio.sleep(2.5)
    for _ in range(2):
        report = await replica.progress({SECOND: 2})
        assert [(p.request_id, p.start, p.tokens.finish_reason) for p in report.deltas] == [(FIRST, 0, "stop")]
        assert (report.running, report.tokens, report.paused) == (1, 4, False)
    assert (await replica.progress({SECOND: 2})).deltas == ()
    await replica.pause(PauseMode.keep)
    assert (await replica.progress({SECOND: 2})).paused
    await replica.resume()
    await group


@on_replica(max_num_seqs=1)
async def test_a_request_that_waits_is_told_of_once(replica: RolloutReplica, engine: ClockedEngine) -> None:
    group = asyncio.create_task(replica.generate_group([make_request("3-0", 9), make_request("3-1", 9)]))
    for seconds, told in ((0.5, {"3-0": 0, "3-1": 0}), (1.0, {"3-0": 1}), (1.0, {"3-0": 2})):
        await asyncio.sleep(seconds)
        deltas = (await replica.progress({})).deltas
        assert {str(partial.request_id): len(partial.tokens.token_ids) for partial in deltas} == told
    assert await replica.abort(["3-1"]) == ["3-1"], "it can be ended although it has no token"
    await replica.abort()
    await group


@on_replica()
async def test_a_request_that_went_on_here_tells_only_what_is_new(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    """Unless it is asked by somebody who knows less than it started with."""
    had = make_completion([7, 8], [0, 0], "")
    request = replace(make_request("3.1-0", 5), partial=had)
    group = asyncio.create_task(replica.generate_group([request]))
    await asyncio.sleep(1.5)
    (piece,) = (await replica.progress({RETRIED: 2})).deltas
    assert (piece.start, piece.tokens.token_ids.tolist()) == (2, [0])
    (piece,) = (await replica.progress({RETRIED: 1})).deltas
    assert (piece.start, piece.tokens.token_ids.tolist()) == (1, [8, 0])
    (completion,) = await group
    assert completion.token_ids.tolist() == [7, 8, 0, 0, 0]
    assert (await replica.stats())["tokens"] == 3, "sampled here"


@on_replica()
async def test_a_request_that_was_complete_when_it_was_lost_costs_no_engine_request(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    had = make_completion([7, 8], [0, 0], "")
    (completion,) = await replica.generate_group([replace(make_request("3.1-0", 2), partial=had)])
    assert completion.token_ids.tolist() == [7, 8] and completion.finish_reason == "length"
    stats = await replica.stats()
    assert stats["engine_requests"] - stats["trajectories"] - stats["continued"] == 0, "nothing was sent twice"


@on_replica()
async def test_what_a_dying_engine_had_sampled_can_still_be_told(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    await replica.progress({})
    had = replace(make_request("3.1-0", 9), partial=make_completion([7], [0], ""))
    group = asyncio.create_task(replica.generate_group([had, make_request("3.1-1", 9)]))
    await asyncio.sleep(2.5)
    engine.kill()
    with pytest.raises(EngineDiedError):
        await group
    for _ in range(3):  # as often as asked: an answer may come too late
        report = await replica.progress({RETRIED: 2})
    told = {str(p.request_id): (p.start, p.tokens.token_ids.tolist(), p.tokens.finish_reason) for p in report.deltas}
    assert told == {"3.1-0": (2, [0], ""), "3.1-1": (0, [0, 0], "")}


@on_replica()
async def test_what_an_environment_said_is_told_with_the_first_tokens_whatever_report_gets_lost(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    progress = Progress()
    progress.begin(3, Attempt(), "r")
    single = make_request("3-1", 5)
    group = asyncio.create_task(replica.generate_group([replace(make_request("3-0", 5), num_observed=1), single]))
    observed = []
    for arrives in (False, False, True, True):
        await asyncio.sleep(1.1)
        report = await replica.progress(progress.known("r"))
        observed.append([delta.observed is not None for delta in report.deltas])
        if arrives:
            progress.take("r", report)
    assert observed == [[True, False]] * 3 + [[False, False]]
    with_observation, without = progress.partials(3)[0, 0], progress.partials(3)[1, 0]
    assert with_observation.observed is not None and with_observation.observed.tolist() == [2]
    assert (with_observation.completion.num_tokens, without.observed) == (4, None)
    await group
