"""Between rollouter and trainer no group is lost, none is trained twice, and every wait has an end."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import AlgorithmConfig, Config, RolloutConfig, StalePolicy, TrainerConfig, WeightSyncConfig
from rollout.buffer import TooFewGroupsError, TrajectoryBuffer, make_buffer, mask_stale
from rollout.failures import FailureBudget, RewardFailuresError
from rollout.staleness import Slot, SlotLedger, StalenessWindow
from rollout.types import TrainBatch, Trajectory, TrajectoryGroup
from tests.support.fakes import make_group, make_mixed_group, make_prompt, make_trajectory, run_virtual, settle
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


def test_one_group_on_its_way() -> None:
    async def main() -> None:
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

    run_virtual(main())


def test_next_batch_waits_for_put_and_claim_waits_for_advance() -> None:
    async def main() -> None:
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

    run_virtual(main())


def test_every_claim_gets_none_when_the_run_has_all_its_groups() -> None:
    async def main() -> None:
        buffer = small_buffer(total=1, max_staleness=3)
        slot = await must_claim(buffer)
        waiters = [asyncio.create_task(buffer.claim()) for _ in range(3)]
        await buffer.put(slot, make_group(0, 0))
        await settle()
        assert not any(waiter.done() for waiter in waiters), (
            "the group may still be dropped, and then another is needed"
        )
        await buffer.next_batch(0)
        assert await asyncio.gather(*waiters) == [None, None, None]
        assert await buffer.claim() is None

    run_virtual(main())


def test_a_slot_dropped_while_the_trainer_waits_is_claimed_again() -> None:
    async def main() -> None:
        buffer = small_buffer(policy=StalePolicy.drop)
        stale = await must_claim(buffer)
        waiter = asyncio.create_task(buffer.claim())
        await buffer.put(stale, make_group(0, 0))
        batch = asyncio.create_task(buffer.next_batch(1))
        await buffer.advance(1)
        await buffer.put(await asyncio.wait_for(waiter, 1) or stale, make_group(1, 1))
        assert ordinals(await batch) == [1]
        assert buffer.gauges()["staleness/dropped_groups"] == 1

    run_virtual(main())


# -- every wait has an end ---------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_come_names_the_knob_and_what_is_missing() -> None:
    async def main() -> None:
        buffer = small_buffer(groups_per_step=2, max_staleness=1)
        slots = [await must_claim(buffer) for _ in range(3)]
        await buffer.put(slots[0], make_group(0, 0))
        started = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError) as caught:
            await buffer.next_batch(0)
        assert asyncio.get_running_loop().time() - started == pytest.approx(TIMEOUT_S)
        for part in ("step 0", "trainer.batch_timeout_s=1000.0", "2 groups in flight", "1 ready", "1 slots free"):
            assert part in str(caught.value)
        await buffer.put(slots[1], make_group(1, 0))
        assert ordinals(await buffer.next_batch(0)) == [0, 1], "the groups are still there"

    run_virtual(main())


def test_a_cancelled_waiter_takes_no_slot_with_it() -> None:
    """Cancelled before, or in the very moment in which it would have got the slot."""

    async def main(cancel_late: bool) -> None:
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

    for cancel_late in (False, True):
        run_virtual(main(cancel_late))


def test_a_cancelled_next_batch_takes_no_group_with_it() -> None:
    async def main() -> None:
        buffer = small_buffer()
        slot = await must_claim(buffer)
        batch = asyncio.create_task(buffer.next_batch(0))
        await settle()
        await buffer.put(slot, make_group(0, 0))
        batch.cancel()
        await settle()
        assert batch.cancelled()
        assert ordinals(await buffer.next_batch(0)) == [0]

    run_virtual(main())


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


def test_mask_policy_trains_a_late_group_without_its_stale_tokens() -> None:
    """max_staleness=1: step 2 may train tokens of version 1, not of version 0."""

    async def main() -> None:
        buffer = small_buffer(policy=StalePolicy.mask, max_staleness=1)
        slot = await must_claim(buffer)
        await buffer.put(slot, make_group(0, 0, 0, 1, 2, group_size=2))
        batch = await buffer.next_batch(2)
        assert batch.masked_tokens == 4
        for trajectory in batch.groups[0].trajectories:
            np.testing.assert_array_equal(only(trajectory).loss_mask, [False, False, True, True])

    run_virtual(main())


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
    ],
)
def test_a_group_with_equal_rewards_makes_room_for_another(rewards: list[float | None], differ: bool) -> None:
    """Rewards that failed do not count; nor does the punishment of long responses."""

    async def main() -> None:
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

    run_virtual(main())


def aborted(*versions: int) -> Trajectory:
    return replace(make_trajectory(*versions), finish_reason="abort")


def test_an_aborted_group_makes_room_for_another() -> None:
    """Nothing is left of it to learn from, and maybe no token that would have a version."""

    async def main() -> None:
        buffer = small_buffer()
        await buffer.put(await must_claim(buffer), replace(make_group(0, 0), trajectories=(aborted(), aborted(0, 0))))
        gauges = buffer.gauges()
        assert (gauges["rollout/aborted_groups"], gauges["rollout/filtered_groups"]) == (1, 0)
        await buffer.put(await must_claim(buffer), make_group(1, 0))
        assert ordinals(await buffer.next_batch(0)) == [1]

    run_virtual(main())


def test_aborted_groups_say_nothing_of_the_prompts() -> None:
    """A client may abort as many as it wants, and equal rewards are counted as before."""

    async def main() -> None:
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

    run_virtual(main())


def test_a_trajectory_aborted_before_its_first_token_leaves_its_group_as_stale_as_it_is() -> None:
    async def main() -> None:
        buffer = small_buffer(max_staleness=1)
        group = replace(make_group(0, 0), trajectories=(aborted(), make_trajectory(1, 2), make_trajectory(2)))
        await buffer.put(await must_claim(buffer), group)
        assert ordinals(await buffer.next_batch(0)) == [0]
        assert group.min_version == 1

    run_virtual(main())


def test_too_many_filtered_groups_in_a_row_name_the_key() -> None:
    """2 batches of 2 may be filtered, again after every batch."""

    async def main() -> None:
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

    run_virtual(main())


def test_filtered_groups_are_no_error_while_a_batch_waits_for_the_trainer() -> None:
    async def main() -> None:
        buffer = small_buffer(groups_per_step=1, max_staleness=9, max_sample_batches=1)
        await buffer.put(await must_claim(buffer), make_mixed_group(0, 0))
        for ordinal in range(1, 9):
            await buffer.put(await must_claim(buffer), make_group(ordinal, 0))
        assert ordinals(await buffer.next_batch(0)) == [0]

    run_virtual(main())


def test_failed_rewards_are_counted_until_there_are_too_many() -> None:
    async def main() -> None:
        buffer = small_buffer(max_staleness=9, failures=FailureBudget(num_trajectories=4, max_failed_rewards=0.5))
        await buffer.put(await must_claim(buffer), failed_group(0, None, 1, None))
        assert buffer.gauges()["rollout/failed_rewards"] == 2
        greedy = replace(make_trajectory(0), error="of the greedy one")
        with pytest.raises(RewardFailuresError, match="the first: no number"):
            await buffer.put(await must_claim(buffer), replace(failed_group(1, 1, 0), greedy=greedy))

    run_virtual(main())


@pytest.mark.parametrize("filter_groups", [False, True])
def test_a_runs_buffer_is_what_the_config_says(filter_groups: bool) -> None:
    config = Config(
        algorithm=AlgorithmConfig(group_size=4, filter_groups=filter_groups, max_sample_batches=1),
        rollout=RolloutConfig(max_staleness=2, max_failed_rewards=0.5, stale_policy=StalePolicy.mask),
        trainer=TrainerConfig(total_steps=6, prompts_per_step=1),
        weight_sync=WeightSyncConfig(interval=3),
    )

    async def main() -> None:
        buffer = make_buffer(config)
        ledger = buffer.ledger
        assert (ledger.window.capacity, ledger.total_groups, ledger.policy) == (9, 6, StalePolicy.mask)
        await buffer.put(await must_claim(buffer), failed_group(0, *[None] * 12))
        assert buffer.gauges()["rollout/filtered_groups"] == filter_groups
        with pytest.raises(RewardFailuresError, match="of the run's 24 trajectories"):
            await buffer.put(await must_claim(buffer), failed_group(1, None))

    run_virtual(main())
