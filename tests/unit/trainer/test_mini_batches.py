"""Mini-batches: how a batch is split, in which order its parts are taken, and what their losses are divided by."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.algorithm import LossAggregation
from configs.schema import AlgorithmConfig, Config, Layout, TrainerConfig
from rollout.types import TrajectoryGroup
from tests.support.batches import pack
from tests.support.reference import make_group, make_trajectory
from trainer.advantages.credit import assign_credit
from trainer.batch import MicroBatch, StepBatch
from trainer.mini_batches import mini_batched, split
from trainer.tokens import TokenSignals, sampled_tokens

CONFIG = Config(
    seed=3,
    algorithm=AlgorithmConfig(group_size=2),
    trainer=TrainerConfig(layout=Layout.packed, tokens_per_micro_batch=16),
)


def groups_of(lengths: list[int], flat: int = -1) -> list[TrajectoryGroup]:
    """Groups of two responses of so many tokens each, one of them right; of the group `flat`, both."""
    return [
        make_group(
            ordinal, [make_trajectory([1], [2 + place] * length, reward=place or ordinal == flat) for place in (0, 1)]
        )
        for ordinal, length in enumerate(lengths)
    ]


def credited(groups: list[TrajectoryGroup], config: Config) -> TokenSignals:
    return assign_credit(groups, sampled_tokens(groups, 0), {}, config, 0).tokens


def batch_of(groups: list[TrajectoryGroup], *, global_steps: int = 0, num_ranks: int = 1, **trainer: int) -> StepBatch:
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, num_ranks=num_ranks, **trainer))
    return mini_batched(groups, credited(groups, config), config, global_steps)


def places(batch: StepBatch) -> list[set[int]]:
    """Return the places of the loss tokens of each optimizer step, on all ranks."""
    return [
        {int(place) for rank in batch.micro_batches for index in part for place in rank[index].index}
        for part in batch.optimizer_steps
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20), st.integers(1, 6))
def test_every_group_is_in_one_part_the_parts_are_balanced_and_all_learn_that_can(
    groups: list[tuple[int, bool]], num_parts: int
) -> None:
    lengths = np.array([length for length, _ in groups], np.int64)
    is_learning = np.array([length > 0 and learns for length, learns in groups], np.bool_)
    parts = split(lengths, is_learning, num_parts)
    assert sorted(place for part in parts for place in part) == list(range(len(groups)))
    assert len(parts) == num_parts and all(part == sorted(part) for part in parts)
    filled = [int(lengths[part].sum()) for part in parts]
    assert max(filled) - min(filled) <= lengths.max(initial=0)
    assert sum(bool(is_learning[part].any()) for part in parts) == min(num_parts, is_learning.sum())
    assert sum(bool(part) for part in parts) == min(num_parts, len(groups))


def test_groups_that_only_count_fill_up_what_those_that_learn_leave() -> None:
    assert split(np.array([9, 8, 3, 2]), np.array([True, False, True, True]), 2) == [[0], [1, 2, 3]]
    assert split(np.array([4, 4, 4]), np.ones(3, np.bool_), 2) == [[0, 2], [1]], "an uneven batch"


def test_every_epoch_takes_every_token_once_in_an_order_of_its_own_that_repeats() -> None:
    groups = groups_of([3, 5, 2, 4, 6, 1, 7, 3])
    batch = batch_of(groups, mini_batches=4, epochs=3)
    everything = set(range(batch.num_tokens))
    assert len(batch.optimizer_steps) == 12
    for epoch in (slice(0, 4), slice(4, 8), slice(8, 12)):
        taken = places(batch)[epoch]
        assert set().union(*taken) == everything and sum(map(len, taken)) == len(everything)
    orders = {batch.optimizer_steps[first : first + 4] for first in (0, 4, 8)}
    assert len(orders) > 1
    assert batch_of(groups, mini_batches=4, epochs=3).optimizer_steps == batch.optimizer_steps
    steps = {batch_of(groups, mini_batches=4, epochs=3, global_steps=step).optimizer_steps for step in range(4)}
    assert len(steps) > 1, "another order in another step"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_parts_are_the_same_whatever_the_ranks_and_every_rank_has_as_many_micro_batches(num_ranks: int) -> None:
    groups = groups_of([3, 5, 2, 4, 6, 1, 7, 3])
    alone, shared = (batch_of(groups, mini_batches=3, epochs=2, num_ranks=ranks) for ranks in (1, num_ranks))
    assert places(shared) == places(alone)
    counts = {len(of_rank) for of_rank in shared.micro_batches}
    assert counts == {max(part.stop for part in shared.optimizer_steps)}


@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_a_loss_is_divided_by_what_its_mini_batch_holds_and_advantages_are_of_the_whole_batch(
    aggregation: LossAggregation,
) -> None:
    """The loss is that of a batch that holds no more. The flat group, which is not computed, is with the longest."""
    algorithm = AlgorithmConfig(
        group_size=2, advantage="reinforce_plus_plus_baseline", loss_aggregation=aggregation, loss_horizon=7
    )
    config = replace(CONFIG, algorithm=algorithm, trainer=replace(CONFIG.trainer, mini_batches=2))
    groups = groups_of([3, 5, 2, 4], flat=0)
    whole = credited(groups, config)
    owners = whole.trajectories // 2
    batch = mini_batched(groups, whole, config, 0)
    computed = [sorted({int(owners[place]) for place in part}) for part in places(batch)]
    assert sorted(computed) == [[1], [2, 3]]
    for part, learning in zip(batch.optimizer_steps, computed, strict=True):
        held = [0, 1] if learning == [1] else [2, 3]
        alone = credited([groups[place] for place in held], config)
        for micro_batch in batch.micro_batches[0][part.start : part.stop]:
            index, tokens = micro_batch.index, micro_batch.tokens
            of_part = np.searchsorted(np.flatnonzero(np.isin(owners, held)), index)
            np.testing.assert_array_equal(tokens.loss_weights, alone.loss_weights[of_part])
            np.testing.assert_array_equal(tokens.advantages, whole.advantages[index])
            assert (tokens.advantages != alone.advantages[of_part]).all()


def test_a_part_with_nothing_to_learn_from_takes_no_optimizer_step_unless_none_has_anything() -> None:
    groups = groups_of([3, 5], flat=1)
    batch = batch_of(groups, mini_batches=2, epochs=2)
    assert places(batch) == [set(range(6))] * 2, "the first group, twice"
    nothing = batch_of(groups_of([5, 3], flat=0)[:1], mini_batches=2)
    assert nothing.optimizer_steps == (range(1),) and nothing.num_trained == 0


@pytest.mark.parametrize("layout", list(Layout))
def test_one_mini_batch_and_one_epoch_are_the_batch_as_it_is(layout: Layout) -> None:
    groups = groups_of([3, 5, 2, 4, 6], flat=2)
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, layout=layout, num_ranks=2))
    found = mini_batched(groups, credited(groups, config), config, 5)
    expected = pack(groups, layout, 2, 16)
    assert found.optimizer_steps == expected.optimizer_steps == (range(len(found.micro_batches[0])),)
    for ours, theirs in zip(found.micro_batches, expected.micro_batches, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_equal(arrays_of(one), arrays_of(other))
            np.testing.assert_equal(arrays_of(one.tokens), arrays_of(other.tokens))


def arrays_of(batch: MicroBatch | TokenSignals) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "tokens"}


def test_a_loss_coefficient_scales_the_tokens_of_its_source_and_of_no_other() -> None:
    """The loss weights themselves are those of all sources together."""
    config = replace(CONFIG, data=replace(CONFIG.data, sources={"a": {}, "b": {"loss_coef": 0.5}}))
    groups = [
        replace(group, prompt=replace(group.prompt, source=source))
        for group, source in zip(groups_of([3, 5]), "ab", strict=True)
    ]
    tokens = credited(groups, config)
    batch = mini_batched(groups, tokens, config, 0)
    weights = batch.gather([[part.tokens.loss_weights for part in rank] for rank in batch.micro_batches])
    assert weights == pytest.approx([1 / 16] * 6 + [0.5 / 16] * 10), "token_mean over 6 + 10 tokens"
