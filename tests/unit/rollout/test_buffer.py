"""Between rollouter and trainer no group is lost and none is trained twice, and every wait has an end."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import StalePolicy
from rollout.buffer import TrainBatch, TrajectoryBuffer, mask_stale
from rollout.staleness import Slot, SlotLedger, StalenessWindow
from tests.support.fakes import make_group, make_trajectory, run_virtual, settle

TIMEOUT_S = 1000.0


def make_buffer(
    groups_per_step: int = 1,
    max_staleness: int = 0,
    policy: StalePolicy = StalePolicy.wait,
    total: int = 99,
) -> TrajectoryBuffer:
    window = StalenessWindow(groups_per_step=groups_per_step, max_staleness=max_staleness)
    return TrajectoryBuffer(SlotLedger(window, policy, total), batch_timeout_s=TIMEOUT_S)


async def must_claim(buffer: TrajectoryBuffer) -> Slot:
    slot = await buffer.claim()
    assert slot is not None
    return slot


def ordinals(batch: TrainBatch) -> list[int]:
    return [group.prompt.ordinal for group in batch.groups]


# -- one step at a time ------------------------------------------------------------------------------------------------


def test_one_group_on_its_way() -> None:
    async def main() -> None:
        buffer = make_buffer()
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


def test_a_batch_is_in_the_order_of_the_prompts_not_of_arrival() -> None:
    async def main() -> None:
        buffer = make_buffer(groups_per_step=3)
        slots = [await must_claim(buffer) for _ in range(3)]
        for ordinal in (2, 0, 1):
            await buffer.put(slots[ordinal], make_group(ordinal, 0))
        assert ordinals(await buffer.next_batch(0)) == [0, 1, 2]

    run_virtual(main())


def test_next_batch_waits_for_put_and_claim_waits_for_advance() -> None:
    async def main() -> None:
        buffer = make_buffer()
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


def test_a_failed_slot_goes_to_the_next_claim() -> None:
    async def main() -> None:
        buffer = make_buffer()
        slot = await must_claim(buffer)
        waiter = asyncio.create_task(buffer.claim())
        await settle()
        await buffer.fail(slot)
        assert (await waiter) == Slot(1, claimed_version=0)

    run_virtual(main())


def test_every_claim_gets_none_when_the_run_has_all_its_groups() -> None:
    async def main() -> None:
        buffer = make_buffer(total=1, max_staleness=3)
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
        buffer = make_buffer(policy=StalePolicy.drop)
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
        buffer = make_buffer(groups_per_step=2, max_staleness=1)
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
        buffer = make_buffer()
        slot = await must_claim(buffer)
        first, second = (asyncio.create_task(buffer.claim()) for _ in range(2))
        await settle()
        if not cancel_late:
            first.cancel()
        await buffer.fail(slot)
        first.cancel()
        assert isinstance(await second, Slot)
        assert first.cancelled()
        assert buffer.ledger.num_in_flight == 1 and buffer.ledger.num_free == 0

    for cancel_late in (False, True):
        run_virtual(main(cancel_late))


def test_a_cancelled_next_batch_takes_no_group_with_it() -> None:
    async def main() -> None:
        buffer = make_buffer()
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
    trajectory.loss_mask[:] = sampled  # false: a tool's tokens, which stay out
    masked = mask_stale(trajectory, lambda version: version >= oldest)
    assert masked.loss_mask.tolist() == [s and v >= oldest for s, v in zip(sampled, versions, strict=True)]
    assert trajectory.loss_mask.tolist() == sampled, "the input is not changed"
    assert masked.response_ids is trajectory.response_ids and masked.spans == trajectory.spans


def test_mask_policy_trains_a_late_group_without_its_stale_tokens() -> None:
    """max_staleness=1: step 2 may train tokens of version 1, not of version 0."""

    async def main() -> None:
        buffer = make_buffer(policy=StalePolicy.mask, max_staleness=1)
        slot = await must_claim(buffer)
        await buffer.put(slot, make_group(0, 0, 0, 1, 2, group_size=2))
        batch = await buffer.next_batch(2)
        assert batch.masked_tokens == 4
        for trajectory in batch.groups[0].trajectories:
            np.testing.assert_array_equal(trajectory.loss_mask, [False, False, True, True])

    run_virtual(main())
