"""A replica's own transaction: freeze, swap, verify, go on. It ends on whole weights, or frozen; never in between."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from configs.schema import InFlightKv, PauseMode, Staging
from rollout.replica.replica import RolloutReplica, WeightVerificationError
from rollout.types import VersionSpan
from tests.support.fakes import (
    ClockedEngine,
    answer,
    make_manifest,
    make_replica,
    make_tag,
    now,
    start_group,
    update,
)
from tests.support.replicas import assert_serves, on_replica
from weight_sync.protocol import Manifest, WeightTag

# -- whole -------------------------------------------------------------------------------------------------------------


@on_replica()
async def test_it_freezes_swaps_and_goes_on_and_reports_its_seconds(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    group = start_group(replica, 5)
    await asyncio.sleep(1.5)
    await replica.stage(make_manifest(1))
    engine.seconds["swap"] = 7
    report = await replica.commit(make_tag(1))
    assert engine.events == ["stage 1", "freeze", "swap 1", "thaw"]
    assert (report.pause_s, now()) == (7, 9), "frozen at 2, between two steps"
    [completion] = await group
    assert completion.spans == (VersionSpan(0, 2, 0), VersionSpan(2, 5, 1))
    await assert_serves(replica, 1)


@on_replica()
async def test_it_generates_while_it_stages(replica: RolloutReplica, engine: ClockedEngine) -> None:
    engine.seconds["stage"] = 20
    staging = asyncio.create_task(replica.stage(make_manifest(1)))
    [completion] = await start_group(replica, 5)
    assert completion.spans == (VersionSpan(0, 5, 0),) and now() == 5 and not staging.done()
    await staging


@on_replica(staging=Staging.none)
async def test_without_staging_the_engine_loads_inside_the_pause(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    report = await replica.receive(make_manifest(1))
    assert engine.events == ["freeze", "load 1", "thaw"] and report.pause_s == 0
    await assert_serves(replica, 1)


@pytest.mark.parametrize(
    ("in_flight_kv", "clearing"), [(InFlightKv.keep, ""), (InFlightKv.recompute, " clearing the cache")]
)
def test_kv_of_requests_in_flight_is_kept_or_computed_again(in_flight_kv: InFlightKv, clearing: str) -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        group = start_group(replica, 5)
        await asyncio.sleep(2.5)
        await update(replica, 1)
        assert engine.events == ["stage 1", f"freeze{clearing}", "swap 1", "thaw"]
        assert [answer(completion) for completion in await group] == [(5, "stop")]

    on_replica(in_flight_kv=in_flight_kv)(test)()


@on_replica()
async def test_it_runs_to_its_end_when_its_caller_goes_away(replica: RolloutReplica, engine: ClockedEngine) -> None:
    group = start_group(replica, 5)
    await asyncio.sleep(0.5)
    engine.seconds["swap"] = 20
    await replica.stage(make_manifest(1))
    driver = asyncio.create_task(replica.commit(make_tag(1)))
    await asyncio.sleep(10)
    driver.cancel()
    await asyncio.wait([driver])
    assert driver.cancelled() and (await replica.status()).global_steps == 0
    [completion] = await group
    assert completion.spans == (VersionSpan(0, 1, 0), VersionSpan(1, 5, 1)) and now() == 25
    await assert_serves(replica, 1)


@on_replica()
async def test_one_at_a_time(replica: RolloutReplica, engine: ClockedEngine) -> None:
    engine.seconds["swap"] = 20
    await replica.stage(make_manifest(1))
    first = asyncio.create_task(replica.commit(make_tag(1)))
    await asyncio.sleep(1)
    with pytest.raises(RuntimeError, match="replica replica-3 is in the midst of an update"):
        await replica.commit(make_tag(1))
    await first
    await update(replica, 2)
    await assert_serves(replica, 2)


@pytest.mark.parametrize("pause_mode", [PauseMode.keep, PauseMode.abort])
def test_a_client_that_keeps_it_paused_finds_the_new_weights_at_the_resume(pause_mode: PauseMode) -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        group = start_group(replica, 4)
        await asyncio.sleep(1.5)
        await replica.pause(PauseMode.keep)
        await replica.stage(make_manifest(1))
        report = await replica.commit(make_tag(1))
        await asyncio.sleep(100)
        status = await replica.status()
        assert (report.pause_s, status.global_steps, status.pause_mode) == (0, 1, "keep")
        assert not group.done() and engine.events[-1] != "thaw"
        await replica.resume()
        assert (await group)[0].spans == (VersionSpan(0, 2, 0), VersionSpan(2, 4, 1))

    on_replica(pause_mode=pause_mode)(test)()


@on_replica()
async def test_one_that_cannot_be_told_to_go_on_says_so_until_it_can(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    group = start_group(replica, 4)
    await asyncio.sleep(1.5)
    engine.seconds["thaw"] = 1e6
    with pytest.raises(TimeoutError, match=r"resuming took longer than weight_sync\.pause_timeout_s=10"):
        await update(replica, 1)
    status = await replica.status()
    assert (status.frozen, status.torn, status.pause_mode, status.global_steps) == (True, False, None, 1)
    del engine.seconds["thaw"]
    await update(replica, 2)
    assert not (await replica.status()).frozen
    assert [answer(completion) for completion in await group] == [(4, "stop")]
    await assert_serves(replica, 2)


# -- torn --------------------------------------------------------------------------------------------------------------

RIGHT = make_tag(1)
TORN = {
    "no worker": [],
    "old version": [WeightTag(0, RIGHT.checksum)],
    "wrong bytes": [WeightTag(1, make_tag(0).checksum)],
    "second worker old": [RIGHT, WeightTag(0, RIGHT.checksum)],
    "second worker wrong bytes": [RIGHT, WeightTag(1, 7)],
    "second worker silent": [RIGHT],
}


async def assert_torn_until_the_next_update(replica: RolloutReplica, engine: ClockedEngine, group: Any) -> None:
    status = await replica.status()
    assert (status.torn, status.global_steps, status.pause_mode) == (True, 0, None) and replica.is_paused()
    assert engine.events[-1] != "thaw"
    num_steps, late = len(engine.step_starts), start_group(replica, 2, prefix="late ")
    await asyncio.sleep(100)
    assert len(engine.step_starts) == num_steps and not group.done()
    engine.tags = None
    engine.errors.clear()
    engine.seconds.clear()
    await update(replica, 2)
    assert (await late)[0].spans == (VersionSpan(0, 2, 2),)
    assert (await group)[0].spans == (VersionSpan(0, 2, 0), VersionSpan(2, 4, 2))
    await assert_serves(replica, 2)


@pytest.mark.parametrize("staging", [Staging.host, Staging.none])
@pytest.mark.parametrize("what", TORN)
def test_a_replica_that_is_not_verified_stays_frozen(what: str, staging: Staging) -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        group = start_group(replica, 4)
        await asyncio.sleep(1.5)
        engine.tags, engine.workers = TORN[what], 2 if "second" in what else 1
        tags = [(tag.global_steps, tag.checksum) for tag in TORN[what]]
        with pytest.raises(WeightVerificationError) as raised:
            await update(replica, 1)
        assert str(raised.value) == {
            "no worker": "0 of 1 workers of replica-3 answered",
            "second worker silent": "1 of 2 workers of replica-3 answered",
        }.get(what, f"workers of replica-3 serve {tags}, published was (1, {RIGHT.checksum})")
        engine.workers = 1
        await assert_torn_until_the_next_update(replica, engine, group)

    on_replica(staging=staging)(test)()


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("staging", [Staging.host, Staging.none])
def test_a_swap_that_fails_or_hangs_leaves_it_frozen(staging: Staging, hangs: bool) -> None:
    call = "load" if staging is Staging.none else "swap"

    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        group = start_group(replica, 4)
        await asyncio.sleep(1.5)
        engine.errors[call], engine.seconds[call] = OSError("out of memory"), 1e6 if hangs else 0
        hung = r"swap on replica-3 took longer than weight_sync\.swap_timeout_s=50"
        with pytest.raises(TimeoutError if hangs else OSError, match=hung if hangs else "out of memory"):
            await update(replica, 1)
        await assert_torn_until_the_next_update(replica, engine, group)

    on_replica(staging=staging)(test)()


@on_replica()
async def test_what_was_not_staged_is_not_committed_and_nothing_is_torn(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    """No byte was copied: the replica goes on as it was, and the version that is staged can still be committed."""
    group = start_group(replica, 5)
    engine.events.clear()
    with pytest.raises(RuntimeError, match="^replica replica-3 cannot commit version 1: nothing is staged$"):
        await replica.commit(make_tag(1))
    await replica.stage(make_manifest(1))
    with pytest.raises(RuntimeError, match="^replica replica-3 cannot commit version 2: version 1 is staged$"):
        await replica.commit(make_tag(2))
    status = await replica.status()
    assert not (status.torn or status.frozen) and status.global_steps == 0 and "freeze" not in engine.events
    await replica.commit(make_tag(1))
    with pytest.raises(RuntimeError, match="cannot commit version 1: nothing is staged"):
        await replica.commit(make_tag(1))
    await group
    await assert_serves(replica, 1)


@pytest.mark.parametrize("checksums", [[8, 8], [8, 9]])
async def test_where_no_checksum_is_known_beforehand_the_workers_must_agree(checksums: list[int]) -> None:
    class Loader(ClockedEngine):
        async def load(self, manifest: Manifest) -> list[WeightTag]:
            return [WeightTag(1, checksum) for checksum in checksums]

    engine = Loader()
    engine.workers = 2
    replica = make_replica("a", engine, staging=Staging.none)
    if len(set(checksums)) == 1:
        await replica.receive(replace(make_manifest(1), checksums=None))
        assert (await replica.status()).global_steps == 1
    else:
        with pytest.raises(WeightVerificationError, match=r"serve \[\(1, 8\), \(1, 9\)\], published was \(1, 8\)"):
            await replica.receive(replace(make_manifest(1), checksums=None))


# -- versions only ascend ----------------------------------------------------------------------------------------------


@on_replica(first_version=None)
async def test_older_weights_than_the_live_ones_are_refused_and_change_nothing(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    await update(replica, 15)  # the first version may be any: that of the checkpoint from which a run resumes
    group = start_group(replica, 5)
    await asyncio.sleep(1.5)
    engine.events.clear()
    older = make_manifest(2)
    for call in (replica.stage(older), replica.receive(older), replica.commit(make_tag(2)), replica.tag_loaded(2)):
        with pytest.raises(ValueError, match="^replica replica-3 serves version 15, and version 2 is older; "):
            await call
    assert engine.events == []
    await update(replica, 15)  # as after an update that failed elsewhere
    [completion] = await group
    assert completion.spans == (VersionSpan(0, 5, 15),)
    await assert_serves(replica, 15)
