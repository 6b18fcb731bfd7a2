"""The buffer between rollouter and trainer: no group is lost or trained twice, and every wait has an end."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import AlgorithmConfig, Config, RolloutConfig, StalePolicy, TrainerConfig, WeightSyncConfig
from rollout.buffer import TooFewGroupsError, TrajectoryBuffer, make_buffer, mask_stale
from rollout.failures import FailureBudget, RewardFailuresError
from rollout.staleness import Slot, SlotLedger, StalenessWindow
from rollout.types import DiscardedGroup, DiscardReason, TrainBatch, Trajectory, TrajectoryGroup
from tests.support.fakes import make_group, make_mixed_group, make_prompt, make_trajectory, now, run_virtual, settle
from tests.support.sequences import only

TIMEOUT_S = 1000.0


def small_buffer(
    groups_per_step: int = 1,
    max_staleness: int = 0,
    policy: StalePolicy = StalePolicy.wait,
    total: int = 99,
    max_sample_batches: int | None = None,
    failures: FailureBudget | None = None,
) -> TrajectoryBuffer:
    window = StalenessWindow(groups_per_step=groups_per_step, max_staleness=max_staleness)
    return TrajectoryBuffer(
        SlotLedger(window, policy, total), TIMEOUT_S, failures or FailureBudget(), max_sample_batches
    )


async def must_claim(buffer: TrajectoryBuffer) -> Slot:
    slot = await buffer.claim()
    assert slot is not None
    return slot


def ordinals(batch: TrainBatch) -> list[int]:
    return [group.prompt.ordinal for group in batch.groups]


# -- one step at a time ------------------------------------------------------------------------------------------------


async def test_one_group_on_its_way() -> None:
    buffer = small_buffer()
    slot = await must_claim(buffer)
    assert buffer.gauges()["rollout/inflight_groups"] == 1
    group = make_group(7, 0, 0)
    await buffer.put(slot, group)
    assert buffer.gauges()["rollout/ready_groups"] == 1
    batch = await buffer.next_batch(0)
    assert batch.groups == (group,) and batch.masked_tokens == 0
    assert buffer.gauges()["rollout/free_slots"] == 0, "held until the weights are live"
    await buffer.advance(1)
    assert buffer.gauges()["rollout/free_slots"] == 1


async def test_next_batch_waits_for_put_and_claim_waits_for_advance() -> None:
    buffer = small_buffer()
    slot = await must_claim(buffer)
    batch = asyncio.create_task(buffer.next_batch(0))
    second = asyncio.create_task(buffer.claim())
    await settle()
    assert not batch.done() and not second.done()
    await buffer.put(slot, make_group(0, 0))
    assert ordinals(await batch) == [0]
    await settle()
    assert not second.done()
    await buffer.advance(1)
    assert (await second) == Slot(1, claimed_version=1)


async def test_every_claim_gets_none_when_the_run_has_all_its_groups() -> None:
    buffer = small_buffer(total=1, max_staleness=3)
    slot = await must_claim(buffer)
    waiters = [asyncio.create_task(buffer.claim()) for _ in range(3)]
    await buffer.put(slot, make_group(0, 0))
    await settle()
    assert not any(waiter.done() for waiter in waiters), "the group may still be dropped, and then another is needed"
    await buffer.next_batch(0)
    assert await asyncio.gather(*waiters) == [None, None, None]
    assert await buffer.claim() is None


async def test_a_slot_dropped_while_the_trainer_waits_is_claimed_again() -> None:
    buffer = small_buffer(policy=StalePolicy.drop)
    stale = await must_claim(buffer)
    waiter = asyncio.create_task(buffer.claim())
    await buffer.put(stale, make_group(0, 0))
    batch = asyncio.create_task(buffer.next_batch(1))
    await buffer.advance(1)
    await buffer.put(await asyncio.wait_for(waiter, 1) or stale, make_group(1, 1))
    assert ordinals(await batch) == [1]
    assert buffer.gauges()["staleness/dropped_groups"] == 1


# -- every wait has an end ---------------------------------------------------------------------------------------------


async def test_a_batch_that_does_not_come_names_the_knob_and_what_is_missing() -> None:
    buffer = small_buffer(groups_per_step=2, max_staleness=1)
    slots = [await must_claim(buffer) for _ in range(3)]
    await buffer.put(slots[0], make_group(0, 0))
    with pytest.raises(TimeoutError) as caught:
        await buffer.next_batch(0)
    assert now() == pytest.approx(TIMEOUT_S)
    lacking = "2 groups in flight, 1 ready, 1 slots free"
    assert str(caught.value) == f"no batch for step 1 within trainer.batch_timeout_s=1000.0: {lacking}"
    await buffer.put(slots[1], make_group(1, 0))
    assert ordinals(await buffer.next_batch(0)) == [0, 1], "the groups are still there"


@pytest.mark.parametrize("cancel_late", [False, True])
async def test_a_cancelled_waiter_takes_no_slot_with_it(cancel_late: bool) -> None:
    """Cancelled before, or in the very moment in which it would have got the slot."""
    buffer = small_buffer()
    slot = await must_claim(buffer)
    first, second = (asyncio.create_task(buffer.claim()) for _ in range(2))
    await settle()
    if not cancel_late:
        first.cancel()
    await buffer.fail(slot, make_prompt(0), OSError())
    first.cancel()
    assert isinstance(await second, Slot)
    assert first.cancelled()
    assert buffer.ledger.num_in_flight == 1 and buffer.ledger.num_free == 0


async def test_a_cancelled_next_batch_takes_no_group_with_it() -> None:
    buffer = small_buffer()
    slot = await must_claim(buffer)
    batch = asyncio.create_task(buffer.next_batch(0))
    await settle()
    await buffer.put(slot, make_group(0, 0))
    batch.cancel()
    await settle()
    assert batch.cancelled()
    assert ordinals(await buffer.next_batch(0)) == [0]


# -- masks -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20).map(sorted), st.integers(0, 7), st.data())
def test_mask_stale_masks_the_stale_tokens_and_no_others(versions: list[int], oldest: int, data: st.DataObject) -> None:
    trajectory = make_trajectory(*versions)
    sampled = data.draw(st.lists(st.booleans(), min_size=len(versions), max_size=len(versions)))
    only(trajectory).loss_mask[:] = sampled  # false: a tool's tokens, which stay out
    masked = mask_stale(trajectory, lambda version: version >= oldest)
    assert only(masked).loss_mask.tolist() == [s and v >= oldest for s, v in zip(sampled, versions, strict=True)]
    assert only(trajectory).loss_mask.tolist() == sampled, "the input is not changed"
    assert only(masked).response_ids is only(trajectory).response_ids and only(masked).spans == only(trajectory).spans


async def test_mask_policy_trains_a_late_group_without_its_stale_tokens() -> None:
    """Step 2 with max_staleness=1 may train tokens of version 1, not of version 0."""
    buffer = small_buffer(policy=StalePolicy.mask, max_staleness=1)
    slot = await must_claim(buffer)
    await buffer.put(slot, make_group(0, 0, 0, 1, 2, group_size=2))
    batch = await buffer.next_batch(2)
    assert batch.masked_tokens == 4
    for trajectory in batch.groups[0].trajectories:
        np.testing.assert_array_equal(only(trajectory).loss_mask, [False, False, True, True])


# -- groups that are not kept, and rewards that fail ------------------------------------------------------------------


def failed_group(ordinal: int, *rewards: float | None) -> TrajectoryGroup:
    """None: the reward failed."""
    trajectories = tuple(
        replace(make_trajectory(0), error="no number") if reward is None else replace(make_trajectory(0), reward=reward)
        for reward in rewards
    )
    return replace(make_group(ordinal, 0), trajectories=trajectories)


@pytest.mark.parametrize(
    ("rewards", "differ"),
    [
        ([0, 0], False),
        ([1, 1, 1], False),
        ([0, 1], True),
        ([1, None, 1], False),
        ([1, None, 0], True),
        ([1, None], False),
        ([0.1 + 0.2, 0.3], False),
        ([1e6 + 0.1, 1e6 + 0.2], True),
    ],
)
async def test_a_group_with_equal_rewards_makes_room_for_another(rewards: list[float | None], differ: bool) -> None:
    """Rewards that failed do not count; nor does the punishment of long responses."""
    buffer = small_buffer(max_sample_batches=1, failures=FailureBudget(num_trajectories=9, max_failed_rewards=1.0))
    slot = await must_claim(buffer)
    waiter = asyncio.create_task(buffer.claim())
    group = failed_group(0, *rewards)
    first, *others = group.trajectories
    await buffer.put(slot, replace(group, trajectories=(replace(first, overlong_penalty=-0.5), *others)))
    await settle()
    assert waiter.done() is not differ
    assert buffer.gauges()["rollout/filtered_groups"] == (not differ)
    if not differ:
        await buffer.put(waiter.result() or slot, make_mixed_group(1, 0))
    assert ordinals(await buffer.next_batch(0)) == [0 if differ else 1]
    waiter.cancel()


def aborted(*versions: int) -> Trajectory:
    return replace(make_trajectory(*versions), finish_reason="abort")


async def test_an_aborted_group_makes_room_for_another() -> None:
    """Nothing is left of it to learn from, and maybe no token that would have a version."""
    buffer = small_buffer()
    told = list[DiscardedGroup]()
    buffer.on_discard = told.append
    await buffer.put(await must_claim(buffer), replace(make_group(0, 0), trajectories=(aborted(), aborted(0, 0))))
    gauges = buffer.gauges()
    assert (gauges["rollout/aborted_groups"], gauges["rollout/filtered_groups"]) == (1, 0)
    assert [(group.reason, len(group.trajectories)) for group in told] == [(DiscardReason.aborted, 2)]
    await buffer.put(await must_claim(buffer), make_group(1, 0))
    assert ordinals(await buffer.next_batch(0)) == [1]


async def test_rewards_that_fail_for_what_a_client_aborted_are_none_that_the_run_counts() -> None:
    """A harness that is refused the rest of its answers has no reward, and a pause in mode abort ends all of them."""
    buffer = small_buffer()
    lost = [replace(aborted(*versions), error="the session has ended") for versions in ((), (0,))]
    await buffer.put(await must_claim(buffer), replace(make_group(0, 0), trajectories=tuple(lost)))
    half = replace(make_group(1, 0), trajectories=(lost[1], make_trajectory(0)), greedy=lost[1])
    await buffer.put(await must_claim(buffer), half)
    assert ordinals(await buffer.next_batch(0)) == [1]
    assert (buffer.gauges()["rollout/failed_rewards"], buffer.gauges()["rollout/aborted_groups"]) == (0, 1)
    await buffer.advance(1)
    failed = replace(make_group(2, 1), trajectories=(replace(make_trajectory(1), error="no"), make_trajectory(1)))
    with pytest.raises(RewardFailuresError, match="^1 rewards failed"):
        await buffer.put(await must_claim(buffer), failed)


async def test_aborted_groups_say_nothing_of_the_prompts() -> None:
    """A client may abort as many as it wants, and equal rewards are counted as before."""
    buffer = small_buffer(max_sample_batches=1)
    await buffer.put(await must_claim(buffer), make_group(0, 0))
    for ordinal in range(1, 9):
        await buffer.put(
            await must_claim(buffer), replace(make_group(ordinal, 0), trajectories=(aborted(0), aborted(0)))
        )
    gauges = buffer.gauges()
    assert (gauges["rollout/aborted_groups"], gauges["rollout/filtered_groups"]) == (8, 1)
    with pytest.raises(TooFewGroupsError, match="^2 groups with equal rewards"):
        await buffer.put(await must_claim(buffer), make_group(9, 0))


async def test_a_trajectory_aborted_before_its_first_token_leaves_its_group_as_stale_as_it_is() -> None:
    buffer = small_buffer(max_staleness=1)
    group = replace(make_group(0, 0), trajectories=(aborted(), make_trajectory(1, 2), make_trajectory(2)))
    await buffer.put(await must_claim(buffer), group)
    assert ordinals(await buffer.next_batch(0)) == [0]
    assert group.min_version == 1


async def test_too_many_filtered_groups_in_a_row_name_the_key() -> None:
    """2 batches of 2 may be filtered, again after every batch."""
    buffer = small_buffer(groups_per_step=2, max_staleness=3, max_sample_batches=2)
    for _ in range(2):
        for ordinal in range(4):
            await buffer.put(await must_claim(buffer), make_group(ordinal, 0))
        for ordinal in (4, 5):
            await buffer.put(await must_claim(buffer), make_mixed_group(ordinal, 0))
        await buffer.next_batch(0)
    await buffer.put(await must_claim(buffer), make_mixed_group(6, 0))
    for ordinal in range(4):
        await buffer.put(await must_claim(buffer), make_group(ordinal, 0))
    with pytest.raises(TooFewGroupsError) as caught:
        await buffer.put(await must_claim(buffer), make_group(5, 0))
    assert "5 groups with equal rewards since the last batch, for 1 that differ" in str(caught.value)
    assert "algorithm.max_sample_batches=2 allows 2 x trainer.prompts_per_step=2" in str(caught.value)


async def test_filtered_groups_are_no_error_while_a_batch_waits_for_the_trainer() -> None:
    buffer = small_buffer(groups_per_step=1, max_staleness=9, max_sample_batches=1)
    await buffer.put(await must_claim(buffer), make_mixed_group(0, 0))
    for ordinal in range(1, 9):
        await buffer.put(await must_claim(buffer), make_group(ordinal, 0))
    assert ordinals(await buffer.next_batch(0)) == [0]


async def test_failed_rewards_are_counted_until_there_are_too_many() -> None:
    buffer = small_buffer(max_staleness=9, failures=FailureBudget(num_trajectories=4, max_failed_rewards=0.5))
    await buffer.put(await must_claim(buffer), failed_group(0, None, 1, None))
    assert buffer.gauges()["rollout/failed_rewards"] == 2
    greedy = replace(make_trajectory(0), error="of the greedy one")
    with pytest.raises(RewardFailuresError, match="the first: no number"):
        await buffer.put(await must_claim(buffer), replace(failed_group(1, 1, 0), greedy=greedy))


@pytest.mark.parametrize("filter_groups", [False, True])
async def test_a_runs_buffer_is_what_the_config_says(filter_groups: bool) -> None:
    config = Config(
        algorithm=AlgorithmConfig(group_size=4, filter_groups=filter_groups, max_sample_batches=1),
        rollout=RolloutConfig(max_staleness=2, max_failed_rewards=0.5, stale_policy=StalePolicy.mask),
        trainer=TrainerConfig(total_steps=6, prompts_per_step=1),
        weight_sync=WeightSyncConfig(interval=3),
    )
    buffer = make_buffer(config)
    ledger = buffer.ledger
    assert (ledger.window.capacity, ledger.total_groups, ledger.policy) == (9, 6, StalePolicy.mask)
    await buffer.put(await must_claim(buffer), failed_group(0, *[None] * 12))
    assert buffer.gauges()["rollout/filtered_groups"] == filter_groups
    with pytest.raises(RewardFailuresError, match="of the run's 24 trajectories"):
        await buffer.put(await must_claim(buffer), failed_group(1, None))


async def test_a_bound_that_no_token_of_the_run_reaches_costs_nothing() -> None:
    """The ledger looks at every step within the bound: 10^9 of them would be 8 GB, for each group that is ready."""
    config = Config(
        rollout=RolloutConfig(max_staleness=10**9), trainer=TrainerConfig(total_steps=4, prompts_per_step=2)
    )
    buffer = make_buffer(config)
    slots = [await must_claim(buffer) for _ in range(8)]
    for ordinal, slot in enumerate(slots):
        await buffer.put(slot, make_group(ordinal, 0))
    assert [ordinals(await buffer.next_batch(step)) for step in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


# -- whole runs --------------------------------------------------------------------------------------------------------


async def whole_run(  # noqa: PLR0913
    buffer: TrajectoryBuffer,
    num_steps: int,
    num_producers: int,
    seconds: list[float],
    flat: list[bool],
    train_s: float,
    sync_s: tuple[float, float],
) -> tuple[list[TrainBatch], int]:
    """`num_producers` at random speed, and a trainer that begins its next step while its weights are on their way.
    `sync_s`: from their publication until they are live, and from then until `advance`. All rewards of a group are
    equal where `flat` says so. Returns the batches, and how many slots were claimed."""
    window, live, next_ordinal = buffer.ledger.window, 0, 0

    async def produce() -> None:
        nonlocal next_ordinal
        while (slot := await buffer.claim()) is not None:
            ordinal, first = next_ordinal, live
            next_ordinal += 1
            await asyncio.sleep(seconds[ordinal % len(seconds)])
            make = make_group if flat[ordinal % len(flat)] else make_mixed_group
            await buffer.put(slot, make(ordinal, first, live))

    async def update(version: int) -> None:
        nonlocal live
        await asyncio.sleep(sync_s[0])
        live = version
        await asyncio.sleep(sync_s[1])
        await buffer.advance(version)

    batches, updating = [], None
    async with asyncio.TaskGroup() as producers:
        for _ in range(num_producers):
            producers.create_task(produce())
        for step in range(num_steps):
            batches.append(await buffer.next_batch(step))
            if window.max_staleness == 0 and step % window.update_interval == 0:
                assert buffer.ledger.live_version == step, "synchronous: it cannot begin before its weights are live"
            await asyncio.sleep(train_s)
            if updating is not None:
                await updating
            if (step + 1) % window.update_interval == 0:
                updating = asyncio.create_task(update(step + 1))
    return batches, next_ordinal


def run_whole(
    policy: StalePolicy, draw: Callable[[Any], Any], flat: list[bool]
) -> tuple[TrajectoryBuffer, list[TrainBatch], int]:
    groups_per_step, interval = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    num_steps = interval * draw(st.integers(1, 5))
    window = StalenessWindow(
        groups_per_step=groups_per_step, max_staleness=draw(st.integers(0, 3)), update_interval=interval
    )
    ledger = SlotLedger(window, policy, num_steps * groups_per_step)
    buffer = TrajectoryBuffer(ledger, batch_timeout_s=100_000.0, max_sample_batches=20)
    told = list[DiscardedGroup]()
    buffer.on_discard = told.append
    seconds = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 7.0, 40.0]), min_size=1, max_size=9))
    work: Coroutine[Any, Any, tuple[list[TrainBatch], int]] = whole_run(
        buffer,
        num_steps,
        draw(st.integers(1, 12)),
        seconds,
        flat,
        draw(st.sampled_from([0.0, 3.0])),
        draw(st.tuples(st.sampled_from([0.0, 2.0, 20.0]), st.integers(0, 2))),
    )
    result = run_virtual(work)
    reasons = Counter(group.reason for group in told)
    assert reasons == Counter({DiscardReason.filtered: buffer.num_filtered, DiscardReason.stale: ledger.num_dropped})
    assert buffer.discarded.total() == len(told) and buffer.num_trained == num_steps * groups_per_step
    return buffer, *result


SOME_DIFFER = st.lists(st.booleans(), min_size=1, max_size=12).filter(lambda some: not all(some))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(StalePolicy)), st.just([False]) | SOME_DIFFER, st.data())
def test_every_prompt_is_trained_filtered_or_dropped_once(
    policy: StalePolicy, flat: list[bool], data: st.DataObject
) -> None:
    """Every batch is full, within the bound, in order and of groups that differ, and no more are claimed than that."""
    buffer, batches, num_claimed = run_whole(policy, data.draw, flat)
    window, ledger = buffer.ledger.window, buffer.ledger
    trained = [ordinal for batch in batches for ordinal in ordinals(batch)]
    assert len(set(trained)) == len(trained) == ledger.total_groups
    assert not any(flat[ordinal % len(flat)] for ordinal in trained)
    assert num_claimed == ledger.total_groups + buffer.num_filtered + ledger.num_dropped
    assert buffer.num_filtered == sum(flat[ordinal % len(flat)] for ordinal in range(num_claimed))
    assert ledger.num_in_flight == ledger.num_ready == 0
    if policy is not StalePolicy.drop:
        assert sorted(trained) == [n for n in range(num_claimed) if not flat[n % len(flat)]]
    for step, batch in enumerate(batches):
        assert len(batch.groups) == window.groups_per_step and ordinals(batch) == sorted(ordinals(batch))
        for trajectory in (trajectory for group in batch.groups for trajectory in group.trajectories):
            versions = only(trajectory).token_versions()[only(trajectory).loss_mask]
            assert all(window.is_fresh(version, step) for version in versions)
            assert only(trajectory).loss_mask.all() or policy is StalePolicy.mask


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(list(StalePolicy)), st.data())
def test_a_run_whose_groups_are_all_filtered_ends_with_an_error(policy: StalePolicy, data: st.DataObject) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_whole(policy, data.draw, [True])
    assert caught.group_contains(TooFewGroupsError, match="algorithm.max_sample_batches=20")
