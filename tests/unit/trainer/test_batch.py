"""From groups to micro-batches: whatever the layout, budget and ranks, every learning token is there once, and sees
exactly what it saw when it was sampled."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Layout
from rollout.types import FloatArray, IntArray, TrajectoryGroup
from tests.support.batches import learning
from tests.support.reference import make_group, make_trajectory
from tests.support.sequences import only
from trainer.batch import MicroBatch, StepBatch, assemble

LAYOUTS = list(Layout)


@dataclass(frozen=True)
class Step:
    groups: list[TrajectoryGroup]
    advantages: list[FloatArray]

    def assemble(self, layout: Layout, num_ranks: int, budget: int, keep_idle: bool = False) -> StepBatch:
        return assemble(
            self.groups,
            learning(self.groups, self.advantages),
            layout=layout,
            num_ranks=num_ranks,
            tokens_per_micro_batch=budget,
            keep_idle=keep_idle,
        )


@dataclass(frozen=True)
class LossToken:
    """What a token of the loss needs; tokens are told apart by their ids, which are unique."""

    context: tuple[int, ...]
    advantage: float
    rollout_logprob: float


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Up to five groups of up to four trajectories. No token id comes twice, except in the prompt of a group."""
    groups, advantages, next_id = [], [], 1
    for ordinal in range(draw(st.integers(0, 5))):
        prompt_ids = list(range(next_id, next_id := next_id + draw(st.integers(1, 6))))
        trajectories = []
        for _ in range(draw(st.integers(1, 4))):
            response_ids = list(range(next_id, next_id := next_id + draw(st.integers(1, 7))))
            loss_mask = draw(st.lists(st.booleans(), min_size=len(response_ids), max_size=len(response_ids)))
            logprobs = [-token / 64 for token in response_ids]
            trajectories.append(
                make_trajectory(prompt_ids, response_ids, loss_mask=loss_mask, rollout_logprobs=logprobs)
            )
        groups.append(make_group(ordinal, trajectories))
        signs = st.sampled_from([-1.5, 0.0, 0.25])
        advantages.append(np.array([draw(signs) for _ in trajectories], np.float32))
    return Step(groups, advantages)


def expected_tokens(step: Step, keep_idle: bool) -> dict[int, LossToken]:
    found = {}
    for group, advantages in zip(step.groups, step.advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, advantages.tolist(), strict=True):
            for i in np.flatnonzero(only(trajectory).loss_mask) if advantage or keep_idle else []:
                context = (*only(trajectory).prompt_ids.tolist(), *only(trajectory).response_ids[:i].tolist())
                logprob = float(only(trajectory).rollout_logprobs[i])
                found[int(only(trajectory).response_ids[i])] = LossToken(context, advantage, logprob)
    return found


def read(batch: MicroBatch) -> list[tuple[int, LossToken]]:
    """Every target with its context: what attention lets its source see, under causal or tree mask."""
    found = []
    for t, (row, source) in enumerate(zip(batch.rows.tolist(), batch.sources.tolist(), strict=True)):
        visible = np.arange(source + 1)
        if batch.segment_ids is not None:
            segments = batch.segment_ids[row, : source + 1]
            visible = visible[(segments == 0) | (segments == segments[source])]
        # Attention knows the order from the positions alone.
        assert batch.position_ids[row, visible].tolist() == list(range(len(visible)))
        context, tokens = tuple(batch.input_ids[row, visible].tolist()), batch.tokens
        token = LossToken(context, float(tokens.advantages[t]), float(tokens.rollout_logprobs[t]))
        found.append((int(tokens.targets[t]), token))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@given(step=steps(), num_ranks=st.integers(1, 4), budget=st.integers(1, 80), keep_idle=st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_learning_token_is_there_once_with_its_context(
    layout: Layout, step: Step, num_ranks: int, budget: int, keep_idle: bool
) -> None:
    batch = step.assemble(layout, num_ranks, budget, keep_idle)
    seen = [token for micro_batches in batch.micro_batches for b in micro_batches for token in read(b)]
    expected = expected_tokens(step, keep_idle)
    assert len(seen) == len(expected) and dict(seen) == expected
    num_masked = sum(int(only(t).loss_mask.sum()) for group in step.groups for t in group.trajectories)
    assert batch.num_tokens == num_masked
    check_gather(batch, learning(step.groups, step.advantages).targets)

    # Ranks run the same collectives.
    assert len(batch.micro_batches) == num_ranks
    assert len({len(micro_batches) for micro_batches in batch.micro_batches}) == 1
    assert len(batch.micro_batches[0]) >= 1
    for micro_batches in batch.micro_batches:
        for micro_batch in micro_batches:
            check_shapes(micro_batch, layout)
            assert micro_batch.input_ids.size <= budget or len(micro_batch.input_ids) == 1


def check_shapes(batch: MicroBatch, layout: Layout) -> None:
    assert batch.input_ids.shape == batch.position_ids.shape
    assert (batch.segment_ids is not None) == (layout is Layout.tree)
    if batch.segment_ids is not None:
        assert batch.segment_ids.shape == batch.input_ids.shape
        assert (batch.input_ids[batch.segment_ids < 0] == 0).all()
    else:  # the engine of a Hugging Face model takes any other positions for packed sequences
        assert (batch.position_ids == np.arange(batch.input_ids.shape[1])).all()
    check_sequences(batch)


def check_sequences(batch: MicroBatch) -> None:
    """Numbered 0 .. K - 1, and each is all the tokens of one response and prompt."""
    numbers = batch.tokens.sequences
    assert np.array_equal(np.unique(numbers), np.arange(batch.num_sequences))
    for number in range(batch.num_sequences):
        mine = np.flatnonzero(numbers == number)
        assert np.array_equal(mine, np.arange(mine[0], mine[-1] + 1))
        assert len(set(batch.rows[mine])) == 1
        assert np.array_equal(batch.index[mine], np.arange(batch.index[mine[0]], batch.index[mine[-1]] + 1))
    if batch.segment_ids is None:
        assert len(set(batch.rows)) == batch.num_sequences


def check_gather(batch: StepBatch, targets: IntArray) -> None:
    """What workers say of their tokens finds its way back; nothing is said of those left out."""
    answers = [[b.tokens.targets.astype(np.float32) for b in rank] for rank in batch.micro_batches]
    computed = {int(target) for rank in answers for answer in rank for target in answer}
    expected = [target if target in computed else 0 for target in targets.tolist()]
    assert batch.gather(answers).tolist() == expected


def example_step() -> Step:
    """[p q] -> [a b], [x y z] as in the docstring of `Row`, and a third response that nothing is learned from."""
    p, q, a, b, x, y, z = range(11, 18)
    trajectories = [
        make_trajectory([p, q], [a, b], rollout_logprobs=[-0.5, -0.25]),
        make_trajectory([p, q], [99, 98, 97]),
        make_trajectory([p, q], [x, y, z], loss_mask=[True, False, True], rollout_logprobs=[-1, 0, -3]),
    ]
    return Step([make_group(0, trajectories)], [np.array([1, 0, -2], np.float32)])


def test_shared_prompt_by_hand() -> None:
    step = example_step().assemble(Layout.tree, 1, 100)
    assert step.num_tokens == 2 + 3 + 2
    batch = step.micro_batches[0][0]
    assert batch.input_ids.tolist() == [[11, 12, 13, 15, 16]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    assert batch.segment_ids is not None
    assert batch.segment_ids.tolist() == [[0, 0, 1, 2, 2]]
    assert batch.rows.tolist() == [0, 0, 0, 0]
    assert batch.sources.tolist() == [1, 2, 1, 4]
    assert batch.tokens.targets.tolist() == [13, 14, 15, 17]
    assert batch.tokens.advantages.tolist() == [1, 1, -2, -2]
    assert batch.tokens.rollout_logprobs.tolist() == [-0.5, -0.25, -1, -3]
    assert batch.tokens.loss_weights.tolist() == [np.float32(1 / 7)] * 4
    assert batch.tokens.sequences.tolist() == [0, 0, 1, 1]
    assert batch.index.tolist() == [0, 1, 5, 6]


def lengths_step(*lengths: int) -> Step:
    """A trajectory of every length, prompt included and the last token, which is no input, left out."""
    groups = [make_group(i, [make_trajectory([1], [2] * length)]) for i, length in enumerate(lengths)]
    return Step(groups, [np.ones(1, np.float32)] * len(groups))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_get_about_as_many_tokens(layout: Layout) -> None:
    step = lengths_step(9, 1, 1, 1, 5, 4)
    batch = step.assemble(layout, 2, 1000)
    assert [sum(len(b.index) for b in micro_batches) for micro_batches in batch.micro_batches] == [11, 10]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_like_length_share_a_micro_batch(layout: Layout) -> None:
    step = lengths_step(2, 20, 3, 19, 2)
    batch = step.assemble(layout, 1, 40)
    assert [b.input_ids.shape for b in batch.micro_batches[0]] == [(2, 20), (3, 3)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_anything_to_learn_every_rank_still_has_a_forward(layout: Layout) -> None:
    solved = Step(example_step().groups, [np.zeros(3, np.float32)])
    batch = solved.assemble(layout, 3, 16)
    assert batch.num_tokens == 7
    assert [[b.input_ids.tolist() for b in rank] for rank in batch.micro_batches] == [[[[0]]]] * 3
