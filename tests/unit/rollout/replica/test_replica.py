"""A replica: groups in, completions out, counters that add up. Updates of its weights are in test_commit."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from configs.schema import PauseMode
from rollout.engines.base import EngineDiedError
from rollout.replica.replica import RolloutReplica
from rollout.types import Completion, GenerationRequest, VersionSpan
from tests.support.fakes import ClockedEngine, answer, make_replica, make_request, settle, start_group, update
from tests.support.replicas import on_replica
from weight_sync.protocol import ReplicaStatus


@on_replica(first_version=None)
async def test_without_weights_nothing_is_generated(replica: RolloutReplica, engine: ClockedEngine) -> None:
    assert replica.global_steps == -1
    with pytest.raises(RuntimeError, match="replica-3 has no weights yet: update_weights comes first"):
        await start_group(replica, 1)
    assert engine.gauges()["engine_requests"] == (await replica.stats())["trajectories"] == 0
    await update(replica, 4)
    [completion] = await start_group(replica, 1)
    assert completion.spans == (VersionSpan(0, 1, 4),)


@on_replica(first_version=None)
async def test_the_weights_it_was_started_with_can_be_given_a_version(replica: RolloutReplica) -> None:
    await replica.tag_loaded(12)
    assert (await replica.status()).global_steps == 12
    [completion] = await start_group(replica, 2)
    assert completion.spans == (VersionSpan(0, 2, 12),)


# -- control: the states are in test_pause ---------------------------------------------------------------------------


@on_replica()
async def test_any_client_that_asks_sees_whether_it_is_paused_how_and_on_which_version(replica: RolloutReplica) -> None:
    is_open = ReplicaStatus(
        name="replica-3", global_steps=0, pause_mode=None, torn=False, frozen=False, is_paused=False
    )
    assert await replica.status() == is_open
    for mode in PauseMode:
        await replica.pause(mode)
        assert replica.is_paused()
        assert await replica.status() == replace(is_open, pause_mode=mode.value, frozen=True, is_paused=True)
    await replica.resume()
    assert not replica.is_paused() and await replica.status() == is_open


@on_replica()
async def test_an_engine_that_does_not_say_what_it_drew_from_is_refused(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    generate = engine.generate

    async def forgetful(request: GenerationRequest) -> Completion:
        return replace(await generate(request), kept=None)

    engine.generate = forgetful
    request, evaluated = make_request("3-0", 2), make_request("eval-3-0", 2)
    truncated = replace(request.sampling, top_p=0.9)
    with pytest.raises(RuntimeError, match=r"^the engine does not say what 3-0 was drawn from: set rollout\.top_p=1 "):
        await replica.generate_group([replace(request, sampling=truncated)])
    await replica.generate_group([make_request("4-0", 2), replace(evaluated, sampling=truncated)])


@on_replica(max_num_seqs=2)
async def test_an_aborted_trajectory_is_an_answer_with_what_it_has(replica: RolloutReplica) -> None:
    group = start_group(replica, 9, 9, 9)
    await asyncio.sleep(2.5)
    assert sorted(await replica.abort({"0-1", "0-2", "unknown"})) == ["0-1", "0-2"]
    assert [answer(completion) for completion in await group] == [(9, "stop"), (2, "abort"), (0, "abort")]
    stats = await replica.stats()
    assert (stats["trajectories"], stats["aborted"], stats["continued"]) == (3, 2, 0)
    assert await replica.abort() == []


async def counters(replica: RolloutReplica) -> dict[str, Any]:
    return {key: value for key, value in (await replica.stats()).items() if key != "busy_s"}


@on_replica()
async def test_counters_add_up(replica: RolloutReplica) -> None:
    await start_group(replica, 3, 1)
    group = start_group(replica, 5, 5, 5)
    await asyncio.sleep(1.5)
    assert await counters(replica) == {
        "global_steps": 0,
        "trajectories": 5,
        "aborted": 0,
        "continued": 0,
        "running": 3,
        "tokens": 4 + 3,
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "engine_requests": 5,
        "running_requests": 3,
        "waiting_requests": 0,
    }
    group.cancel()
    await asyncio.wait([group])
    assert (await counters(replica))["aborted"] == 3
    assert (await counters(replica))["running"] == 0
    await start_group(replica, 2)
    assert (await counters(replica))["tokens"] == 4 + 3 + 2, "also those of whom nobody waited for"


@on_replica()
async def test_a_replica_is_busy_from_its_first_request_to_its_last(replica: RolloutReplica) -> None:
    await asyncio.sleep(10)
    assert (await replica.stats())["busy_s"] == 0
    group = start_group(replica, 4, 2)
    await asyncio.sleep(3.5)
    assert (await replica.stats())["busy_s"] == 3.5
    await group
    await asyncio.sleep(10)
    assert (await replica.stats())["busy_s"] == 4
    await start_group(replica, 1)
    assert (await replica.stats())["busy_s"] == 5
    report = await replica.progress({})
    assert (report.busy_s, report.request_s) == (5, 4 + 2 + 1)


@on_replica()
async def test_the_death_of_the_engine_ends_all_groups_and_is_told(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    watcher = asyncio.create_task(replica.wait_dead())
    group = start_group(replica, 9, 9)
    await asyncio.sleep(1.5)
    assert not watcher.done()
    engine.kill()
    assert isinstance(await watcher, EngineDiedError)
    with pytest.raises(EngineDiedError):
        await group
    await settle()
    assert (await counters(replica))["running"] == 0


async def test_one_failed_request_ends_its_group_and_no_other() -> None:
    class FailingEngine(ClockedEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            completion = await super().generate(request)
            if len(completion.token_ids) == 2:
                raise OSError("after two tokens")
            return completion

    replica = make_replica("replica-0", FailingEngine())
    await update(replica, 0)
    other = start_group(replica, 3, prefix="other ")
    with pytest.raises(OSError, match="after two tokens"):
        await start_group(replica, 9, 2, 9)
    assert len((await other)[0].token_ids) == 3
    stats = await counters(replica)
    assert (stats["trajectories"], stats["aborted"], stats["running"]) == (4, 3, 0)


@on_replica()
async def test_a_watcher_that_gives_up_does_not_end_the_watch_of_others(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    first, second = (asyncio.create_task(replica.wait_dead()) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    engine.kill()
    assert isinstance(await second, EngineDiedError)
