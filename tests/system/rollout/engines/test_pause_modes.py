"""Pause modes and updates on a real engine behind its replica: what ends, what is held, and what goes on."""

import asyncio

import numpy as np
import pytest
import torch

from configs.schema import PauseMode, WeightSyncConfig
from rollout.replica.replica import RolloutReplica
from rollout.types import Completion, GenerationRequest, VersionSpan
from tests.support.engines import (
    BOTH_SCHEDULERS,
    MAX_NUM_SEQS,
    EngineHost,
    prompt,
    push,
    reference_logprobs,
    request,
    until,
)
from tests.support.weights import publish, random_weights

pytestmark = pytest.mark.usefixtures("native")
TOKENS = 800


async def make_replica(
    host: EngineHost, weights: dict[str, torch.Tensor], version: int, mode: PauseMode = PauseMode.keep
) -> RolloutReplica:
    """`mode`: how it pauses for updates."""
    replica = RolloutReplica("replica-0", host.engine, WeightSyncConfig(pause_mode=mode))
    await push(replica, publish(weights, version))
    return replica


def requests(count: int, max_tokens: int = TOKENS) -> list[GenerationRequest]:
    """Greedy, the same prompts and limits for the same arguments, and always new names."""
    return [request(prompt(index, 20 + index), max_tokens=max_tokens) for index in range(count)]


def generating(replica: RolloutReplica, sent: list[GenerationRequest]) -> list[asyncio.Task[Completion]]:
    async def one(request: GenerationRequest) -> Completion:
        return (await replica.generate_group([request]))[0]

    return [asyncio.create_task(one(request)) for request in sent]


def check_begins_as(part: Completion, whole: Completion) -> None:
    """Token by token and logprob by logprob, with spans over all of it."""
    count = len(part.token_ids)
    np.testing.assert_array_equal(part.token_ids, whole.token_ids[:count])
    np.testing.assert_allclose(part.logprobs, whole.logprobs[:count], atol=3e-5)  # and as many as tokens
    assert [0, *(span.end for span in part.spans)] == [*(span.start for span in part.spans), count]


@pytest.mark.slow
@BOTH_SCHEDULERS
def test_pause_abort_ends_requests_with_the_tokens_they_have(host: EngineHost) -> None:
    """An update came in their midst, so that each has tokens of two versions; those without a seat have none."""
    weights = random_weights(host.model_path, 200)

    async def scenario() -> tuple[list[Completion], list[Completion], Completion]:
        replica = await make_replica(host, weights, 200)
        calm = await replica.generate_group(requests(MAX_NUM_SEQS))
        tasks = generating(replica, [*requests(MAX_NUM_SEQS), *requests(4)])
        await host.every_one_has(MAX_NUM_SEQS, 5)
        await push(replica, publish(weights, 201))
        at_least = max(60, 5 + max(host.engine._llm.output_counts().values()))
        await host.every_one_has(MAX_NUM_SEQS, at_least)
        async with asyncio.timeout(30):
            await replica.pause(PauseMode.abort)
            assert host.engine.running == [] and host.engine._llm.output_counts() == {}
            ended = await asyncio.gather(*tasks)
        late = generating(replica, requests(1))
        await asyncio.sleep(0.3)
        assert not late[0].done() and host.engine._llm.output_counts() == {}
        await replica.resume()
        return calm, ended, await late[0]

    calm, ended, late = host.run(scenario())
    assert {completion.finish_reason for completion in ended} == {"abort"}
    for part, whole in zip(ended[:MAX_NUM_SEQS], calm, strict=True):
        assert 60 <= len(part.token_ids) < TOKENS
        check_begins_as(part, whole)
        assert [span.global_steps for span in part.spans] == [200, 201]
    for never_ran in ended[MAX_NUM_SEQS:]:
        assert (len(never_ran.token_ids), len(never_ran.logprobs), never_ran.spans) == (0, 0, ())
    check_begins_as(late, calm[0])
    assert (late.finish_reason, late.spans) == ("length", (VersionSpan(0, TOKENS, 201),))
    ids = [*prompt(0, 20), *ended[0].token_ids.tolist()]
    np.testing.assert_allclose(ended[0].logprobs, reference_logprobs(host, weights, ids, start=20), atol=3e-5)


@pytest.mark.slow
def test_updates_that_abort_leave_one_trajectory_of_the_same_tokens(host: EngineHost) -> None:
    """The same weights are pushed twice with weight_sync.pause_mode=abort. There are more requests than seats, and a
    client aborts one of them between the updates."""
    weights = random_weights(host.model_path, 220)

    async def scenario() -> tuple[list[Completion], list[Completion]]:
        replica = await make_replica(host, weights, 220, PauseMode.abort)
        calm = await replica.generate_group(requests(MAX_NUM_SEQS))
        before = await replica.stats()
        sent = [*requests(MAX_NUM_SEQS), *requests(2)]
        tasks = generating(replica, sent)
        await host.every_one_has(MAX_NUM_SEQS, 20)
        await push(replica, publish(weights, 221))
        # Each part counts from 0. Its client knows a request by the name it gave it, whatever part of it runs.
        await host.every_one_has(MAX_NUM_SEQS, 30)
        name = str(sent[3].request_id)
        assert await replica.abort([name]) == [name]
        assert (await tasks[3]).finish_reason == "abort"
        await until(lambda: host.engine.gauges()["waiting_requests"] == 1)
        await host.every_one_has(MAX_NUM_SEQS, 5)
        await push(replica, publish(weights, 222))
        completions = await asyncio.gather(*tasks)
        stats = await replica.stats()
        assert stats["continued"] - before["continued"] == 2 * MAX_NUM_SEQS, "each that ran, at each update"
        assert stats["engine_requests"] - before["engine_requests"] == len(sent) + 2 * MAX_NUM_SEQS
        assert stats["trajectories"] - before["trajectories"] == len(sent)
        return calm, completions

    calm, completions = host.run(scenario())
    aborted = completions.pop(3)
    check_begins_as(aborted, calm.pop(3))
    assert 50 <= len(aborted.token_ids) < TOKENS and [span.global_steps for span in aborted.spans] == [220, 221]
    for completion, whole in zip(completions, [*calm, *calm[:2]], strict=True):
        assert (len(completion.token_ids), completion.finish_reason) == (TOKENS, "length")
        check_begins_as(completion, whole)
    versions = [[span.global_steps for span in completion.spans] for completion in completions]
    # Those that were interrupted have their seats back before any that waited gets one.
    assert versions == [[220, 221, 222]] * (MAX_NUM_SEQS - 1) + [[221, 222], [222]]


@pytest.mark.slow
def test_after_an_update_that_aborts_every_token_is_of_weights_that_saw_the_whole_sequence(host: EngineHost) -> None:
    """Other weights each time: logprobs of a part are those of its version, for its prompt and all parts before."""
    weights = {version: random_weights(host.model_path, version) for version in (230, 231, 232)}

    async def scenario() -> list[Completion]:
        replica = await make_replica(host, weights[230], 230, PauseMode.abort)
        tasks = generating(replica, requests(4))
        for version in (231, 232):
            await host.every_one_has(4, 30)
            await push(replica, publish(weights[version], version))
        return await asyncio.gather(*tasks)

    for index, completion in enumerate(host.run(scenario())):
        ids = prompt(index, 20 + index)
        assert (len(completion.token_ids), completion.finish_reason) == (TOKENS, "length")
        assert [span.global_steps for span in completion.spans] == [230, 231, 232]
        check_begins_as(completion, completion)
        for span in completion.spans:
            tokens = [*ids, *completion.token_ids.tolist()]
            expected = reference_logprobs(host, weights[span.global_steps], tokens, start=len(ids))
            part = slice(span.start, span.end)
            np.testing.assert_allclose(completion.logprobs[part], expected[part], atol=3e-5)
