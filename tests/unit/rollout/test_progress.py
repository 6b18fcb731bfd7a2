"""What a replica tells of its requests, piece by piece, is what they have, whatever report gets lost."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import PauseMode
from rollout.agents.loop import resume_from
from rollout.engines.base import EngineDiedError
from rollout.progress import Attempt, PartialCompletion, Progress, ProgressReport, TokenDelta, prompt_checksum
from rollout.replica.replica import RolloutReplica
from rollout.request_ids import InGroup, RequestId
from rollout.types import Completion, GenerationRequest
from tests.support.fakes import ClockedEngine, make_completion, make_request, now, run_virtual, update
from tests.unit.rollout.replica.test_commit import on_replica


def rid(name: str) -> RequestId:
    request_id = RequestId.parse(name)
    assert request_id is not None
    return request_id


def report_of(*deltas: TokenDelta) -> ProgressReport:
    return ProgressReport(tokens=0, running=0, paused=False, busy_s=0.0, request_s=0.0, deltas=deltas)


def delta(name: str, start: int, tokens: Completion, checksum: int = 5) -> TokenDelta:
    return TokenDelta(request_id=rid(name), prompt_checksum=checksum, start=start, tokens=tokens)


def tokens_of(partials: dict[InGroup, PartialCompletion]) -> dict[InGroup, list[int]]:
    return {key: partial.completion.token_ids.tolist() for key, partial in partials.items()}


# -- the driver's side -------------------------------------------------------------------------------------------------


@given(
    versions=st.lists(st.integers(0, 3), min_size=1, max_size=12).map(sorted),
    asked_at=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=8),
)
def test_pieces_add_up_to_the_whole_whatever_reports_get_lost(
    versions: list[int], asked_at: list[tuple[int, bool]]
) -> None:
    tokens = list(range(20, 20 + len(versions)))
    progress = Progress()
    progress.begin(3, Attempt(), "a")
    for length, arrives in [*sorted(asked_at), (len(tokens), True)]:
        start = progress.known("a").get(rid("3-0"), 0)
        now_there = make_completion(tokens[:length], versions[:length], "")
        if arrives:
            progress.take("a", report_of(delta("3-0", start, now_there.after(start))))
    partial = progress.partials(3)[0, 0].completion
    whole = make_completion(tokens, versions, "")
    assert partial.token_ids.tolist() == tokens and partial.spans == whole.spans
    assert partial.logprobs.tolist() == whole.logprobs.tolist()


def test_only_the_present_attempt_on_its_replica_is_believed() -> None:
    progress, piece = Progress(), make_completion([7], [0], "")
    progress.begin(3, Attempt(number=1), "b")
    for replica, name in (("a", "3.1-0"), ("b", "3-0"), ("b", "4-0"), ("b", "eval-3.1-0")):
        progress.take(replica, report_of(delta(name, 0, piece)))
    assert progress.partials(3) == {} and progress.known("b") == {}
    progress.take("b", report_of(delta("3.1-0", 0, piece), delta("3.1-1-1", 0, piece)))
    assert tokens_of(progress.partials(3)) == {(0, 0): [7], (1, 1): [7]}
    assert progress.known("b") == {rid("3.1-0"): 1, rid("3.1-1-1"): 1} and progress.known("a") == {}
    progress.take("b", report_of(delta("3.1-0", 0, piece)))  # a second time
    assert tokens_of(progress.partials(3))[0, 0] == [7]


def test_an_attempt_starts_with_what_it_goes_on_from_and_ends_with_its_group() -> None:
    progress = Progress()
    had = PartialCompletion(prompt_checksum=5, completion=make_completion([7, 8], [0, 0], ""))
    progress.begin(3, Attempt(number=2, partials={(0, 0): had}), "b")
    assert progress.known("b") == {rid("3.2-0"): 2}
    progress.take("b", report_of(delta("3.2-0", 2, make_completion([9], [1], "stop"))))
    partial = progress.partials(3)[0, 0].completion
    assert partial.token_ids.tolist() == [7, 8, 9] and partial.finish_reason == "stop"
    progress.end(3)
    progress.end(3)
    assert progress.known("b") == {}


def test_a_request_with_another_prompt_is_another_request() -> None:
    """An environment that answered otherwise, the second time."""
    progress = Progress()
    had = PartialCompletion(prompt_checksum=5, completion=make_completion([7, 8], [0, 0], "stop"))
    progress.begin(3, Attempt(number=1, partials={(0, 1): had}), "b")
    progress.take("b", report_of(delta("3.1-0-1", 0, make_completion([4], [1], ""), checksum=6)))
    assert tokens_of(progress.partials(3)) == {(0, 1): [4]} and progress.partials(3)[0, 1].prompt_checksum == 6


def test_tokens_of_another_prompt_are_not_taken_for_the_ends_of_the_old_ones() -> None:
    """The replica was asked for what comes after the two tokens that are known, of the old prompt."""
    progress = Progress()
    had = PartialCompletion(prompt_checksum=5, completion=make_completion([7, 8], [0, 0], ""))
    progress.begin(3, Attempt(number=1, partials={(0, 1): had}), "b")
    new = make_completion([4, 5, 6], [1, 1, 1], "")
    progress.take("b", report_of(delta("3.1-0-1", 2, new.after(2), checksum=6)))
    assert progress.partials(3) == {} and progress.known("b") == {}
    progress.take("b", report_of(delta("3.1-0-1", 0, new, checksum=6)))
    assert tokens_of(progress.partials(3)) == {(0, 1): [4, 5, 6]}


def test_a_request_without_a_token_is_known_to_run_and_no_more() -> None:
    progress, nothing = Progress(), make_completion([], [], "")
    progress.begin(3, Attempt(number=1), "b")
    assert progress.running(3) == []
    progress.take("b", report_of(delta("3.1-0", 0, nothing), delta("3.1-1", 0, make_completion([7], [0], "stop"))))
    assert progress.running(3) == [rid("3.1-0")]
    assert tokens_of(progress.partials(3)) == {(1, 0): [7]}
    progress.take("b", report_of(delta("3.1-0", 0, make_completion([8], [0], "", cached_tokens=2))))
    partial = progress.partials(3)[0, 0].completion
    assert (partial.token_ids.tolist(), partial.cached_tokens, progress.running(3)) == ([8], 2, [rid("3.1-0")])


# -- the replica's side ------------------------------------------------------------------------------------------------


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

    on_replica(test, max_num_seqs=2, pause_mode=mode)


def test_the_end_of_a_request_is_told_twice_and_then_forgotten() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        await replica.generate_group([make_request("3-0", 1)])
        assert (await replica.progress({})).deltas == (), "nobody had asked"
        group = asyncio.create_task(replica.generate_group([make_request("3-0", 1), make_request("3-1", 4)]))
        await asyncio.sleep(2.5)
        for _ in range(2):
            report = await replica.progress({rid("3-1"): 2})
            assert [(p.request_id, p.start, p.tokens.finish_reason) for p in report.deltas] == [(rid("3-0"), 0, "stop")]
            assert (report.running, report.tokens, report.paused) == (1, 4, False)
        assert (await replica.progress({rid("3-1"): 2})).deltas == ()
        await replica.pause(PauseMode.keep)
        assert (await replica.progress({rid("3-1"): 2})).paused
        await replica.resume()
        await group

    on_replica(test)


def test_a_request_that_waits_is_told_of_once() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        group = asyncio.create_task(replica.generate_group([make_request("3-0", 9), make_request("3-1", 9)]))
        for seconds, told in ((0.5, {"3-0": 0, "3-1": 0}), (1.0, {"3-0": 1}), (1.0, {"3-0": 2})):
            await asyncio.sleep(seconds)
            deltas = (await replica.progress({})).deltas
            assert {str(partial.request_id): len(partial.tokens.token_ids) for partial in deltas} == told
        assert await replica.abort(["3-1"]) == ["3-1"], "it can be ended although it has no token"
        await replica.abort()
        await group

    on_replica(test, max_num_seqs=1)


def test_a_request_that_went_on_here_tells_only_what_is_new() -> None:
    """Unless it is asked by somebody who knows less than it started with."""

    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        had = make_completion([7, 8], [0, 0], "")
        request = replace(make_request("3.1-0", 5), partial=had)
        group = asyncio.create_task(replica.generate_group([request]))
        await asyncio.sleep(1.5)
        (piece,) = (await replica.progress({rid("3.1-0"): 2})).deltas
        assert (piece.start, piece.tokens.token_ids.tolist()) == (2, [0])
        (piece,) = (await replica.progress({rid("3.1-0"): 1})).deltas
        assert (piece.start, piece.tokens.token_ids.tolist()) == (1, [8, 0])
        (completion,) = await group
        assert completion.token_ids.tolist() == [7, 8, 0, 0, 0]
        assert (await replica.stats())["tokens"] == 3, "sampled here"

    on_replica(test)


def test_a_request_that_was_complete_when_it_was_lost_costs_no_engine_request() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        had = make_completion([7, 8], [0, 0], "")
        (completion,) = await replica.generate_group([replace(make_request("3.1-0", 2), partial=had)])
        assert completion.token_ids.tolist() == [7, 8] and completion.finish_reason == "length"
        stats = await replica.stats()
        assert stats["engine_requests"] - stats["trajectories"] - stats["continued"] == 0, "nothing was sent twice"

    on_replica(test)


def test_what_a_dying_engine_had_sampled_can_still_be_told() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        await replica.progress({})
        had = replace(make_request("3.1-0", 9), partial=make_completion([7], [0], ""))
        group = asyncio.create_task(replica.generate_group([had, make_request("3.1-1", 9)]))
        await asyncio.sleep(2.5)
        engine.kill()
        with pytest.raises(EngineDiedError):
            await group
        report = await replica.progress({rid("3.1-0"): 2})
        told = {
            str(p.request_id): (p.start, p.tokens.token_ids.tolist(), p.tokens.finish_reason) for p in report.deltas
        }
        assert told == {"3.1-0": (2, [0], ""), "3.1-1": (0, [0, 0], "")}

    on_replica(test)


# -- the agent worker's side -------------------------------------------------------------------------------------------


def test_what_is_complete_is_answered_at_once_and_the_rest_goes_on() -> None:
    calls: list[list[GenerationRequest]] = []

    async def generate(requests: list[GenerationRequest]) -> list[Completion]:
        calls.append(requests)
        return [make_completion([1], [4], "stop") for _ in requests]

    checksum = prompt_checksum((1, 2))
    done, begun = make_completion([5], [3], "length"), make_completion([6], [3], "")
    partials = {
        (0, 0): PartialCompletion(prompt_checksum=checksum, completion=done),
        (1, 0): PartialCompletion(prompt_checksum=checksum, completion=begun),
        (3, 0): PartialCompletion(prompt_checksum=checksum + 1, completion=done),  # of another prompt
    }
    requests = [make_request(f"9.4-{index}", 8) for index in range(4)]

    async def main() -> None:
        resumed = resume_from(partials, generate)
        answers = await resumed(requests)
        assert [answer.token_ids.tolist() for answer in answers] == [[5], [1], [1], [1]]
        assert calls == [[replace(requests[1], partial=begun), requests[2], requests[3]]]
        assert await resumed(requests[:1]) == [done] and len(calls) == 1, "the replica is not asked for nothing"

    run_virtual(main())


def test_a_prompts_checksum_is_of_its_tokens() -> None:
    assert prompt_checksum((1, 2)) == prompt_checksum(np.array([1, 2])) != prompt_checksum((2, 1))  # pyright: ignore
