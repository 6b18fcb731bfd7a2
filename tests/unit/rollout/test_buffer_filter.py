"""What the buffer does not keep: groups whose rewards are all equal, and a run whose rewards fail too often."""

import asyncio
from dataclasses import replace

import pytest

from configs.schema import AlgorithmConfig, Config, RolloutConfig, StalePolicy, TrainerConfig, WeightSyncConfig
from rollout.buffer import TooFewGroupsError, TrainBatch, TrajectoryBuffer, make_buffer
from rollout.failures import FailureBudget, RewardFailuresError, failure_budget
from rollout.staleness import Slot, SlotLedger, StalenessWindow
from rollout.types import Trajectory, TrajectoryGroup
from tests.support.fakes import make_group, make_mixed_group, make_trajectory, run_virtual, settle


def small_buffer(
    groups_per_step: int = 1,
    max_staleness: int = 0,
    max_sample_batches: int | None = None,
    failures: FailureBudget | None = None,
) -> TrajectoryBuffer:
    window = StalenessWindow(groups_per_step=groups_per_step, max_staleness=max_staleness)
    ledger = SlotLedger(window, StalePolicy.wait, total_groups=99)
    return TrajectoryBuffer(ledger, 1000.0, failures, max_sample_batches)


async def must_claim(buffer: TrajectoryBuffer) -> Slot:
    slot = await buffer.claim()
    assert slot is not None
    return slot


def ordinals(batch: TrainBatch) -> list[int]:
    return [group.prompt.ordinal for group in batch.groups]


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
        buffer = small_buffer(max_sample_batches=1, failures=FailureBudget(1.0, 9))
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
        assert buffer.gauges()["rollout/filtered_groups"] == 1
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
        assert buffer.gauges()["rollout/filtered_groups"] == 9
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


def test_without_the_filter_groups_with_equal_rewards_are_trained() -> None:
    async def main() -> None:
        buffer = small_buffer()
        await buffer.put(await must_claim(buffer), make_group(0, 0, group_size=4))
        assert ordinals(await buffer.next_batch(0)) == [0]
        assert buffer.gauges()["rollout/filtered_groups"] == 0

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
        buffer = small_buffer(max_staleness=9, failures=FailureBudget(0.5, 4))
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
        buffer = make_buffer(config, failure_budget(config))
        ledger = buffer.ledger
        assert (ledger.window.capacity, ledger.total_groups, ledger.policy) == (9, 6, StalePolicy.mask)
        await buffer.put(await must_claim(buffer), failed_group(0, *[None] * 12))
        assert buffer.gauges()["rollout/filtered_groups"] == filter_groups
        with pytest.raises(RewardFailuresError, match="of the run's 24 trajectories"):
            await buffer.put(await must_claim(buffer), failed_group(1, None))

    run_virtual(main())
