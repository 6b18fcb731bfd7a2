"""Whole runs on a virtual clock: producers at random speed, a trainer, and a buffer between them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import StalePolicy
from rollout.buffer import TooFewGroupsError, TrainBatch, TrajectoryBuffer
from rollout.staleness import SlotLedger, StalenessWindow
from tests.support.fakes import make_group, make_mixed_group, run_virtual
from tests.support.sequences import only


def ordinals(batch: TrainBatch) -> list[int]:
    return [group.prompt.ordinal for group in batch.groups]


async def whole_run(  # noqa: PLR0913
    buffer: TrajectoryBuffer,
    num_steps: int,
    num_producers: int,
    seconds: list[float],
    flat: list[bool],
    train_s: float,
    sync_s: tuple[float, float],
) -> list[TrainBatch]:
    """`num_producers` at random speed, and a trainer that begins its next step while its weights are on their way.
    `sync_s`: from their publication until they are live, and from then until `advance`. All rewards of a group are
    equal where `flat` says so."""
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
    return batches


def run_whole(
    policy: StalePolicy, draw: Callable[[Any], Any], flat: list[bool] | None = None
) -> tuple[TrajectoryBuffer, list[TrainBatch]]:
    """`flat` filters groups."""
    groups_per_step, interval = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    num_steps = interval * draw(st.integers(1, 5))
    window = StalenessWindow(
        groups_per_step=groups_per_step, max_staleness=draw(st.integers(0, 3)), update_interval=interval
    )
    ledger = SlotLedger(window, policy, num_steps * groups_per_step)
    buffer = TrajectoryBuffer(ledger, batch_timeout_s=100_000.0, max_sample_batches=None if flat is None else 20)
    seconds = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 7.0, 40.0]), min_size=1, max_size=9))
    work: Coroutine[Any, Any, list[TrainBatch]] = whole_run(
        buffer,
        num_steps,
        draw(st.integers(1, 12)),
        seconds,
        flat or [False],
        draw(st.sampled_from([0.0, 3.0])),
        draw(st.tuples(st.sampled_from([0.0, 2.0, 20.0]), st.integers(0, 2))),
    )
    return buffer, run_virtual(work)


flags = st.lists(st.booleans(), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([StalePolicy.wait, StalePolicy.mask]), st.data())
def test_every_prompt_is_trained_exactly_once(policy: StalePolicy, data: st.DataObject) -> None:
    buffer, batches = run_whole(policy, data.draw)
    trained = [ordinal for batch in batches for ordinal in ordinals(batch)]
    assert sorted(trained) == list(range(buffer.ledger.total_groups))
    window = buffer.ledger.window
    for step, batch in enumerate(batches):
        assert ordinals(batch) == sorted(ordinals(batch))
        for trajectory in (trajectory for group in batch.groups for trajectory in group.trajectories):
            versions = only(trajectory).token_versions()[only(trajectory).loss_mask]
            assert all(window.is_fresh(version, step) for version in versions)
            assert only(trajectory).loss_mask.all() or policy is StalePolicy.mask


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_drop_trains_nothing_stale_and_counts_what_it_drops(data: st.DataObject) -> None:
    buffer, batches = run_whole(StalePolicy.drop, data.draw)
    window, ledger = buffer.ledger.window, buffer.ledger
    assert all(len(batch.groups) == window.groups_per_step for batch in batches)
    assert ledger.num_claimed == ledger.total_groups + ledger.num_dropped
    for step, batch in enumerate(batches):
        assert all(window.is_fresh(group.min_version, step) for group in batch.groups)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(StalePolicy)), flags.filter(lambda some: not all(some)), st.data())
def test_filtered_groups_are_refilled_exactly(policy: StalePolicy, flat: list[bool], data: st.DataObject) -> None:
    """Every batch is full, within the bound, and of groups that differ; every prompt is trained, filtered or dropped,
    and no more are claimed than that."""
    buffer, batches = run_whole(policy, data.draw, flat)
    window, ledger = buffer.ledger.window, buffer.ledger
    trained = [ordinal for batch in batches for ordinal in ordinals(batch)]
    assert len(set(trained)) == len(trained) == ledger.total_groups
    assert not any(flat[ordinal % len(flat)] for ordinal in trained)
    assert ledger.num_claimed == ledger.total_groups + buffer.num_filtered + ledger.num_dropped
    assert buffer.num_filtered == sum(flat[ordinal % len(flat)] for ordinal in range(ledger.num_claimed))
    assert ledger.num_in_flight == ledger.num_ready == 0
    if policy is not StalePolicy.drop:
        assert sorted(trained) == [n for n in range(ledger.num_claimed) if not flat[n % len(flat)]]
    for step, batch in enumerate(batches):
        assert len(batch.groups) == window.groups_per_step
        for trajectory in (trajectory for group in batch.groups for trajectory in group.trajectories):
            versions = only(trajectory).token_versions()[only(trajectory).loss_mask]
            assert all(window.is_fresh(version, step) for version in versions)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(list(StalePolicy)), st.data())
def test_a_run_whose_groups_are_all_filtered_ends_with_an_error(policy: StalePolicy, data: st.DataObject) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_whole(policy, data.draw, [True])
    assert caught.group_contains(TooFewGroupsError, match="algorithm.max_sample_batches=20")
