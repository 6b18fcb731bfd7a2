"""Groups become micro-batches: whatever the layout, budget and ranks, every learning token is there once, and sees
exactly what it saw when it was sampled."""

import zlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Layout
from rollout.types import (
    FloatArray,
    KeptTokens,
    Prompt,
    Routes,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from tests.support import routes as routing
from tests.support.batches import pack
from tests.support.kept import kept_of, rows_of
from tests.support.reference import make_group, make_trajectory
from tests.support.sequences import only
from trainer.batch import MicroBatch, StepBatch
from trainer.tokens import TrainedTokens

LAYOUTS = list(Layout)


@dataclass(frozen=True)
class Step:
    groups: list[TrajectoryGroup]
    advantages: list[FloatArray]

    def assemble(
        self,
        layout: Layout,
        num_ranks: int = 1,
        budget: int = 1000,
        keep_idle: bool = False,
    ) -> StepBatch:
        return pack(self.groups, layout, num_ranks, budget, keep_idle=keep_idle, advantages=self.advantages)


@dataclass(frozen=True)
class LossToken:
    """A token of the loss, with all that it needs."""

    target: int
    context: tuple[int, ...]
    advantage: float
    rollout_logprob: float
    kept: list[int]


@st.composite
def kept_tokens(draw: st.DrawFn, num_tokens: int) -> KeptTokens | None:
    rows = draw(st.none() | st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=num_tokens, max_size=num_tokens))
    return None if rows is None else kept_of(rows)


@st.composite
def token_sequences(draw: st.DrawFn, prompt_ids: list[int]) -> TokenSequence:
    """Draw sequences of three token ids, so that some begin alike."""
    response_ids = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    loss_mask = draw(st.lists(st.booleans(), min_size=len(response_ids), max_size=len(response_ids)))
    logprobs = draw(st.lists(st.integers(-64, 0), min_size=len(response_ids), max_size=len(response_ids)))
    logprobs = [logprob / 64 for logprob in logprobs]
    sequence = only(make_trajectory(prompt_ids, response_ids, loss_mask=loss_mask, rollout_logprobs=logprobs))
    return replace(sequence, kept=draw(kept_tokens(len(response_ids))))


@st.composite
def trajectories(draw: st.DrawFn, prompt_ids: list[int]) -> Trajectory:
    """Up to three sequences, each after the first a branch of one before; or none."""
    sequences: list[TokenSequence] = []
    for _ in range(draw(st.integers(0, 3))):
        begun = prompt_ids
        if sequences:
            parent = draw(st.sampled_from(sequences)).token_ids.tolist()
            begun = parent[: draw(st.integers(len(prompt_ids), len(parent)))]
        sequences.append(draw(token_sequences(begun)))
    return replace(make_trajectory(prompt_ids, [1]), sequences=tuple(sequences))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Up to four groups of up to four trajectories."""
    groups, advantages = [], []
    for ordinal in range(draw(st.integers(0, 4))):
        prompt_ids = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
        of_group = tuple(draw(st.lists(trajectories(prompt_ids), min_size=1, max_size=4)))
        prompt = Prompt(ordinal=ordinal, text="", token_ids=tuple(prompt_ids), ground_truth="")
        groups.append(TrajectoryGroup(prompt=prompt, trajectories=of_group))
        signs = st.sampled_from([-1.5, 0.0, 0.25])
        advantages.append(np.array([draw(signs) for _ in of_group], np.float32))
    return Step(groups, advantages)


def expected_tokens(step: Step, keep_idle: bool) -> dict[int, LossToken]:
    """Return the learning tokens by their place in the step."""
    found, place = {}, 0
    for group, advantages in zip(step.groups, step.advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, advantages.tolist(), strict=True):
            for sequence in trajectory.sequences:
                for i in np.flatnonzero(sequence.loss_mask):
                    target, context = int(sequence.response_ids[i]), (*sequence.prompt_ids, *sequence.response_ids[:i])
                    if advantage or keep_idle:
                        logprob = float(sequence.rollout_logprobs[i])
                        kept = [] if sequence.kept is None else rows_of(sequence.kept)[i]
                        found[place] = LossToken(target, tuple(map(int, context)), advantage, logprob, kept)
                    place += 1
    return found


def read(batch: MicroBatch) -> list[tuple[int, LossToken]]:
    """Every target with its context: what attention lets its source see, under causal or tree mask."""
    found = []
    kept = [[] for _ in batch.index] if batch.tokens.kept is None else rows_of(batch.tokens.kept)
    for t, (row, source) in enumerate(zip(batch.rows.tolist(), batch.sources.tolist(), strict=True)):
        visible = np.arange(source + 1)
        if batch.last is not None:
            visible = visible[source <= batch.last[row, : source + 1]]
        # Attention knows the order from the positions alone.
        assert batch.position_ids[row, visible].tolist() == list(range(len(visible)))
        context, tokens = tuple(batch.input_ids[row, visible].tolist()), batch.tokens
        token = LossToken(
            int(tokens.targets[t]), context, float(tokens.advantages[t]), float(tokens.rollout_logprobs[t]), kept[t]
        )
        found.append((int(batch.index[t]), token))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    step=steps(),
    num_ranks=st.integers(1, 4),
    budget=st.integers(1, 80),
    keep_idle=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_learning_token_is_there_once_with_its_context(
    layout: Layout, step: Step, num_ranks: int, budget: int, keep_idle: bool
) -> None:
    batch = step.assemble(layout, num_ranks, budget, keep_idle)
    seen = [token for micro_batches in batch.micro_batches for b in micro_batches for token in read(b)]
    expected = expected_tokens(step, keep_idle)
    assert len(seen) == len(expected) and dict(seen) == expected
    assert batch.num_tokens == sum(t.num_loss_tokens for group in step.groups for t in group.trajectories)
    check_gather(batch)

    # Ranks run the same collectives.
    assert len(batch.micro_batches) == num_ranks
    assert len({len(micro_batches) for micro_batches in batch.micro_batches}) == 1
    assert len(batch.micro_batches[0]) >= 1
    for micro_batches in batch.micro_batches:
        for micro_batch in micro_batches:
            check_shapes(micro_batch)
            check_sequences(micro_batch, layout)
            assert micro_batch.input_ids.size <= budget or micro_batch.tokens.num_sequences == 1


def expert(ids: list[int], version: int) -> int:
    """Return the experts of an input, which depend on it, on all before it, and on the weights."""
    return zlib.crc32(bytes([version, *ids])) % 40


@pytest.mark.parametrize("layout", LAYOUTS)
@given(step=steps(), data=st.data())
@settings(max_examples=50, deadline=None)
def test_every_input_has_the_experts_of_its_sequence_or_of_one_that_begins_so(
    layout: Layout, step: Step, data: st.DataObject
) -> None:
    missing: list[int] = []  # rows in front, by loss token
    versions: list[int] = []  # by loss token

    def routed(sequence: TokenSequence) -> TokenSequence:
        ids, version = sequence.token_ids.tolist(), data.draw(st.integers(1, 2))
        rows = [expert(ids[: place + 1], version) for place in range(len(ids) - 1)]
        gone = data.draw(st.integers(0, len(rows)))
        missing.extend([gone] * int(sequence.loss_mask.sum()))
        versions.extend([version] * int(sequence.loss_mask.sum()))
        sequence = replace(sequence, spans=(VersionSpan(0, len(sequence.response_ids), version),))
        return sequence if gone == len(rows) else replace(sequence, routes=routing.some_routes(rows[gone:]))

    def with_routes(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, sequences=tuple(map(routed, trajectory.sequences)))

    groups = [replace(group, trajectories=tuple(map(with_routes, group.trajectories))) for group in step.groups]
    batch = Step(groups, step.advantages).assemble(layout, num_ranks=2, budget=40, keep_idle=True)
    for micro_batch in (each for rank in batch.micro_batches for each in rank):
        for row, source, index in zip(micro_batch.rows, micro_batch.sources, micro_batch.index, strict=True):
            visible = np.arange(source + 1)
            if micro_batch.last is not None:
                visible = visible[source <= micro_batch.last[row, : source + 1]]
            ids = micro_batch.input_ids[row, visible].tolist()
            rows: list[int | None] = [None] * len(ids)
            if micro_batch.routes is not None:
                rows = routing.rows_of(Routes(experts=micro_batch.routes[row, visible]))
            expected = [expert(ids[: place + 1], versions[index]) for place in range(len(ids))]
            known = [row is not None for row in rows]
            own = [place >= missing[index] for place in range(len(ids))]
            assert all(row in (None, number) for row, number in zip(rows, expected, strict=True))
            assert all(there for there, needed in zip(known, own, strict=True) if needed)
            assert known == own or layout is Layout.tree


def check_shapes(batch: MicroBatch) -> None:
    assert batch.input_ids.shape == batch.position_ids.shape
    if batch.last is None:  # the code of a Hugging Face model takes any other positions for packed sequences
        assert (batch.position_ids == np.arange(batch.input_ids.shape[1])).all()
    else:
        assert batch.last.shape == batch.input_ids.shape
        assert len(batch.last) == 1 and (batch.input_ids != 0).all()  # no padding


def check_sequences(batch: MicroBatch, layout: Layout) -> None:
    """Numbered 0 .. K - 1, and each is all the tokens of one response and prompt."""
    numbers = batch.tokens.sequences
    assert np.array_equal(np.unique(numbers), np.arange(batch.tokens.num_sequences))
    for number in range(batch.tokens.num_sequences):
        mine = np.flatnonzero(numbers == number)
        assert np.array_equal(mine, np.arange(mine[0], mine[-1] + 1))
        assert len(set(batch.rows[mine])) == 1
        assert np.array_equal(batch.index[mine], np.arange(batch.index[mine[0]], batch.index[mine[-1]] + 1))
    if layout is Layout.rows:
        assert batch.last is None
        assert len(set(batch.rows)) == batch.tokens.num_sequences
    elif layout is Layout.packed:
        assert (batch.last is None) == (batch.tokens.num_sequences <= 1)
        assert batch.tokens.num_sequences == max(1, (batch.position_ids == 0).sum()) or not len(batch.index)


def check_gather(batch: StepBatch) -> None:
    """Check that the workers' answers find their way back, and that nothing is said of the tokens left out."""
    answers = [[(b.index + 1).astype(np.float32) for b in rank] for rank in batch.micro_batches]
    computed = {place for rank in batch.micro_batches for b in rank for place in b.index.tolist()}
    assert batch.gather(answers).tolist() == [i + 1 if i in computed else 0 for i in range(batch.num_tokens)]


def example_step() -> Step:
    """[p q] -> [a b], [x y z] as in the docstring of `Row`, and a third response that nothing is learned from."""
    p, q, a, b, x, y, z = range(11, 18)
    trajectories = [
        make_trajectory([p, q], [a, b], rollout_logprobs=[-0.5, -0.25]),
        make_trajectory([p, q], [99, 98, 97]),
        make_trajectory([p, q], [x, y, z], loss_mask=[True, False, True], rollout_logprobs=[-1, 0, -3]),
    ]
    return Step([make_group(0, trajectories)], [np.array([1, 0, -2], np.float32)])


def test_a_tree_by_hand() -> None:
    step = example_step().assemble(Layout.tree)
    assert step.num_tokens == 2 + 3 + 2
    batch = step.micro_batches[0][0]
    assert batch.input_ids.tolist() == [[11, 12, 13, 15, 16]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    assert batch.last is not None
    assert batch.last.tolist() == [[4, 4, 2, 4, 4]]
    assert batch.rows.tolist() == [0, 0, 0, 0]
    assert batch.sources.tolist() == [1, 2, 1, 4]
    assert batch.tokens.targets.tolist() == [13, 14, 15, 17]
    assert batch.tokens.advantages.tolist() == [1, 1, -2, -2]
    assert batch.tokens.rollout_logprobs.tolist() == [-0.5, -0.25, -1, -3]
    assert batch.tokens.loss_weights.tolist() == [np.float32(1 / 7)] * 4
    assert batch.tokens.sequences.tolist() == [0, 0, 1, 1]
    assert batch.index.tolist() == [0, 1, 5, 6]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_follows_the_last_loss_token_is_not_computed(layout: Layout) -> None:
    groups = [make_group(0, [make_trajectory([5], [6, 7, 8, 9], loss_mask=[True, True, False, False])])]
    (batch,) = Step(groups, [np.ones(1, np.float32)]).assemble(layout).micro_batches[0]
    assert batch.input_ids.tolist() == [[5, 6]]


def similar_step(num_shared: int, num_own: int) -> Step:
    """A group of four sequences that begin alike: so many tokens are inputs, shared by all or only its own."""
    own = np.arange(4 * (num_own + 1)).reshape(4, -1) + 100
    shared = list(range(num_shared))
    group = make_group(0, [make_trajectory(shared or [row[0]], row[not shared :].tolist()) for row in own])
    return Step([group], [np.ones(4, np.float32)])


def shapes(batch: StepBatch) -> list[tuple[int, int]]:
    return [b.input_ids.shape for rank in batch.micro_batches for b in rank]


def test_a_tree_beyond_the_budget_is_cut_and_each_part_has_the_beginning() -> None:
    step = similar_step(num_shared=10, num_own=5)
    assert shapes(step.assemble(Layout.tree, budget=30)) == [(1, 10 + 4 * 5)]
    assert shapes(step.assemble(Layout.tree, budget=29)) == [(1, 25), (1, 15)]
    assert shapes(step.assemble(Layout.tree, budget=1)) == [(1, 15)] * 4


def test_a_beginning_is_shared_from_a_quarter_of_the_sequence_on() -> None:
    assert shapes(similar_step(num_shared=5, num_own=15).assemble(Layout.tree)) == [(1, 5 + 4 * 15)]
    assert shapes(similar_step(num_shared=5, num_own=16).assemble(Layout.tree)) == [(1, 4 * 21)]


def test_a_sequence_that_another_begins_with_costs_nothing_however_short_it_is() -> None:
    group = make_group(0, [make_trajectory([1], [2, 3]), make_trajectory([1], [2, *range(10, 30)])])
    assert shapes(Step([group], [np.ones(2, np.float32)]).assemble(Layout.tree)) == [(1, 1 + 20)]


@given(num_own=st.integers(1, 9), num_ranks=st.integers(1, 3), budget=st.integers(1, 99))
def test_where_nothing_is_shared_trees_are_packed_sequences(num_own: int, num_ranks: int, budget: int) -> None:
    step = similar_step(0, num_own)
    tree, packed = (step.assemble(layout, num_ranks, budget) for layout in (Layout.tree, Layout.packed))
    for found, expected in zip(tree.micro_batches, packed.micro_batches, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert np.array_equal(ours.input_ids, theirs.input_ids)
            assert np.array_equal(ours.position_ids, theirs.position_ids)
            assert ours.last is theirs.last or np.array_equal(ours.last, theirs.last)


def lengths_step(*lengths: int) -> Step:
    """A trajectory of every length, prompt included and the last token, which is no input, left out."""
    groups = [make_group(i, [make_trajectory([1], [2] * length)]) for i, length in enumerate(lengths)]
    return Step(groups, [np.ones(1, np.float32)] * len(groups))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_get_about_as_many_tokens(layout: Layout) -> None:
    step = lengths_step(9, 1, 1, 1, 5, 4)
    batch = step.assemble(layout, 2, 1000)
    assert [sum(len(b.index) for b in micro_batches) for micro_batches in batch.micro_batches] == [11, 10]


def test_rows_of_like_length_share_a_micro_batch() -> None:
    step = lengths_step(2, 20, 3, 19, 2)
    assert shapes(step.assemble(Layout.rows, 1, 40)) == [(2, 20), (3, 3)]


@pytest.mark.parametrize("layout", [Layout.tree, Layout.packed])
def test_sequences_end_to_end_fill_the_budget(layout: Layout) -> None:
    """Each where the least room is left, and one beyond the budget alone."""
    step = lengths_step(9, 50, 25, 30, 15, 2)
    assert shapes(step.assemble(layout, 1, 40)) == [(1, 50), (1, 30 + 9), (1, 25 + 15), (1, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_anything_to_learn_every_rank_still_has_a_forward(layout: Layout) -> None:
    solved = Step(example_step().groups, [np.zeros(3, np.float32)])
    batch = solved.assemble(layout, 3, 16)
    assert batch.num_tokens == 7
    assert [[b.input_ids.tolist() for b in rank] for rank in batch.micro_batches] == [[[[0]]]] * 3


def told(places: np.ndarray, advantages: np.ndarray) -> TrainedTokens:
    return TrainedTokens(
        logprobs=places.astype(np.float32),
        advantages=advantages,
        is_clipped=places % 2 == 0,
        is_rejected=places % 3 == 0,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@given(step=steps(), num_ranks=st.integers(1, 4), budget=st.integers(1, 80))
@settings(max_examples=50, deadline=None)
def test_what_ranks_made_of_their_tokens_goes_back_to_its_place(
    layout: Layout, step: Step, num_ranks: int, budget: int
) -> None:
    """Each rank says of a token its place; those that taught nothing have no logprob and no advantage."""
    batch = step.assemble(layout, num_ranks, budget)
    made = []
    for micro_batches in batch.micro_batches:
        places = np.concatenate([one.index for one in micro_batches])
        advantages = np.concatenate([one.tokens.advantages for one in micro_batches])
        made.append(told(places, advantages))
    gathered, expected = batch.gather_trained(made), expected_tokens(step, keep_idle=False)
    for place in range(batch.num_tokens):
        if place in expected:
            assert gathered.logprobs[place] == place and gathered.advantages[place] == expected[place].advantage
            assert (gathered.is_clipped[place], gathered.is_rejected[place]) == (place % 2 == 0, place % 3 == 0)
        else:
            assert np.isnan(gathered.logprobs[place]) and not gathered.advantages[place]
