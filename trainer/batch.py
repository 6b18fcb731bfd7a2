"""Micro-batches from trajectory groups: laid out in rows, balanced over ranks, filled up to a token budget.

Pure numpy: the driver builds batches, the train workers only turn them into tensors. Layout, budget and number of ranks
do not change loss or gradient, because each token carries everything it needs, its loss weight included, and no
sequence is split.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from configs.schema import Layout, TrainerConfig
from rollout.types import FloatArray, IntArray, Routes, TokenSequence, TrajectoryGroup
from trainer.metrics import Metric
from trainer.prefix_tree import PrefixTree, cut, lexicographic_order
from trainer.tokens import TokenSignals, TrainedTokens, join

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One row of a micro-batch: prefix trees of one or more sequences (`PrefixTree`), end to end.

    Example, prompt [p q] with responses [a b] and [x y z]; the last token of a response is a target only:
        input_ids    p q a x y
        position_ids 0 1 2 2 3
        last         4 4 2 4 4
        sources      1 2 1 3 4    (the position whose output predicts each target)
        targets      a b x y z
    """

    input_ids: IntArray  # [L]
    position_ids: IntArray  # [L]
    last: IntArray  # [L]
    sources: IntArray  # [T]
    index: IntArray  # [T] place of each target among the step's loss tokens
    routes: Routes | None = None  # [L] None: the routers choose by themselves

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def is_chain(self) -> bool:
        """True if the row is one sequence and prefixes of it."""
        return bool((self.last == len(self) - 1).all())

    @classmethod
    def joined(cls, rows: Sequence[Self]) -> Self:
        """Return one row with the trees of all rows."""
        starts = np.cumsum([0, *(len(row) for row in rows[:-1])], dtype=np.int32)
        return cls(
            input_ids=np.concatenate([row.input_ids for row in rows]),
            position_ids=np.concatenate([row.position_ids for row in rows]),
            last=np.concatenate([row.last + start for row, start in zip(rows, starts, strict=True)]),
            sources=np.concatenate([row.sources + start for row, start in zip(rows, starts, strict=True)]),
            index=np.concatenate([row.index for row in rows]),
            routes=placed_routes(rows, starts.tolist(), sum(map(len, rows))),
        )


def placed_routes(rows: Sequence[Row], starts: Sequence[int], length: int) -> Routes | None:
    """[length] Return the experts of rows that begin at `starts`."""
    pairs = zip(rows, starts, strict=True)
    return Routes.placed([(row.routes, slice(start, start + len(row))) for row, start in pairs], length)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The row of one forward and backward pass; with Layout.rows several, padded on the right to the longest."""

    input_ids: Int64Array  # [N, L]
    position_ids: Int64Array  # [N, L]
    last: Int64Array | None
    """[N, L] where each token's subtree ends: token i attends to j iff j <= i <= last[j]. None: each row is one
    sequence, plain causal attention."""
    rows: Int64Array  # [T] row of each loss token
    sources: Int64Array  # [T] position whose output predicts it
    index: Int64Array  # [T] place among the step's loss tokens
    tokens: TokenSignals
    routes: NDArray[np.unsignedinteger] | None = None
    """[N, L, layers, top_k] the experts of each token (`Routes`). None: the routers choose by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """The micro-batches of a step."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    """One tuple for each rank. All have the same length, because every rank runs the same collectives."""
    optimizer_steps: tuple[range, ...]
    """The places of the micro-batches of each optimizer step, in order, the same for every rank.

    Example, two mini-batches of 3 and 2 micro-batches, gone through twice: (0 1 2) (3 4) (3 4) (0 1 2)
    """
    num_tokens: int
    """Loss tokens of the step, including those in no micro-batch."""

    @property
    def num_trained(self) -> int:
        """Loss tokens that are in a micro-batch: those that are computed."""
        return sum(len(micro_batch.index) for rank_batches in self.micro_batches for micro_batch in rank_batches)

    def gather(self, outputs: Sequence[Sequence[FloatArray]]) -> FloatArray:
        """Put outputs [T] of each rank and micro-batch into the order of the step's loss tokens."""
        gathered = np.zeros(self.num_tokens, np.float32)
        for micro_batches, rank_outputs in zip(self.micro_batches, outputs, strict=True):
            for micro_batch, output in zip(micro_batches, rank_outputs, strict=True):
                gathered[micro_batch.index] = output
        return gathered

    def gather_trained(self, tokens_by_rank: Sequence[TrainedTokens]) -> TrainedTokens:
        """Put what each rank made of its tokens into the order of the step's loss tokens."""
        gathered = TrainedTokens.none(self.num_tokens)
        for micro_batches, tokens in zip(self.micro_batches, tokens_by_rank, strict=True):
            index = join([micro_batch.index for micro_batch in micro_batches], np.int64)
            for name, into in gathered.arrays().items():
                into[index] = tokens.arrays()[name]
        return gathered


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, of one rank or of all."""

    metrics: dict[str, Metric]
    tokens: TrainedTokens | None = None
    """None where nothing was trained, and without trainer.record_tokens."""
    weights: str = ""
    """The digest of the weights after the step (`trainer.worker.digest`)."""


class Placed(NamedTuple):
    """A sequence with a loss token, as far as it is computed."""

    input_ids: IntArray  # [L] the tokens up to the last source: nothing is computed of what follows
    sources: NDArray[np.intp]  # [T] the place in the sequence from which each loss token is predicted, the one before
    index: NDArray[np.intp]  # [T] place of each loss token in the step
    routes: Routes | None = None  # [L]
    computed_by: IntArray | None = None
    """[L] the version that computed each token first, where there are routes: other weights sent it elsewhere, so it is
    shared with no sequence that they computed. None: all that have the token share it."""

    @property
    def shared(self) -> NDArray[np.integer]:
        """[L] Return numbers that are equal where sequences may share a token."""
        if self.computed_by is None:
            return self.input_ids
        return (self.computed_by.astype(np.int64) + 1 << 31) + self.input_ids

    @classmethod
    def of(cls, sequence: TokenSequence, first_token: int) -> Self:
        """Place a sequence whose first loss token has the number `first_token` in the step."""
        sources = len(sequence.prompt_ids) - 1 + np.flatnonzero(sequence.loss_mask)
        index = first_token + np.arange(len(sources))
        length = int(sources[-1]) + 1
        routes = routes_of_inputs(sequence, length)
        computed_by = None if routes is None else first_versions(sequence)[:length]
        return cls(sequence.token_ids[:length], sources, index, routes, computed_by)


def first_versions(sequence: TokenSequence) -> IntArray:
    """Return the version that first computed each input: the one that sampled the next token that was sampled."""
    versions = sequence.token_versions()
    places = np.where(versions >= 0, np.arange(len(versions)), len(versions) - 1)
    following = np.minimum.accumulate(places[::-1])[::-1]
    return np.concatenate([np.repeat(versions[following[:1]], len(sequence.prompt_ids) - 1), versions[following]])


def routes_of_inputs(sequence: TokenSequence, length: int) -> Routes | None:
    """[length] Return the experts of the first inputs of a sequence."""
    routes = sequence.input_routes
    return None if routes is None else routes.of_inputs(sequence.num_inputs).first(length)


def assemble(
    groups: Sequence[TrajectoryGroup],
    tokens: TokenSignals,
    *,
    layout: Layout,
    num_ranks: int,
    tokens_per_micro_batch: int,
    keep_idle: bool,
    parts: Sequence[Sequence[int]] | None = None,
) -> StepBatch:
    """Build the micro-batches of a step. Those of each part are balanced over the ranks, and are one optimizer step.

    Args:
        tokens: the loss tokens of `groups`.
        keep_idle: include trajectories of which nothing is learned otherwise, because entropy, KL or critic give them a
            gradient.
        parts: the places of the groups of each mini-batch; None: all in one. A part without anything to compute is
            left out, unless it is the only one.
    """
    rows: list[list[Row]] = []  # by group
    for sequences in learning_sequences(groups, tokens, keep_idle=keep_idle):
        learning = [Placed.of(sequence, first) for sequence, first in sequences if sequence.loss_mask.any()]
        rows.append(rows_of(learning, layout, tokens_per_micro_batch))
    rows_of_parts = [[row for place in part for row in rows[place]] for part in parts or [range(len(groups))]]
    fill = _padded if layout is Layout.rows else _joined
    return lay_out(rows_of_parts, tokens, lambda rows: fill(rows, tokens_per_micro_batch), num_ranks)


def assemble_for(
    trainer: TrainerConfig,
    groups: Sequence[TrajectoryGroup],
    tokens: TokenSignals,
    *,
    keep_idle: bool,
    parts: Sequence[Sequence[int]] | None = None,
) -> StepBatch:
    """Build the micro-batches of a step (`assemble`) as the config lays them out."""
    return assemble(
        groups,
        tokens,
        layout=trainer.layout,
        num_ranks=trainer.data_parallel,
        tokens_per_micro_batch=trainer.tokens_per_micro_batch,
        keep_idle=keep_idle,
        parts=parts,
    )


def learning_sequences(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, *, keep_idle: bool
) -> Iterator[list[tuple[TokenSequence, int]]]:
    """Yield for each group the sequences of the trajectories that are computed, with the place of each one's first loss
    token. The arguments are those of `assemble`. Raises ValueError after the last group where the signals are of other
    tokens."""
    learning = set(np.unique(tokens.trajectories if keep_idle else tokens.trajectories[tokens.is_learning]).tolist())
    number, first_token = 0, 0
    for group in groups:
        sequences: list[tuple[TokenSequence, int]] = []
        for trajectory in group.trajectories:
            for sequence in trajectory.sequences:
                if number in learning:
                    sequences.append((sequence, first_token))
                first_token += int(sequence.loss_mask.sum())
            number += 1
        yield sequences
    if first_token != len(tokens.targets):
        raise ValueError(f"signals of {len(tokens.targets)} loss tokens, but the groups have {first_token}")


def rows_of(learning: Sequence[Placed], layout: Layout, max_tokens: int) -> list[Row]:
    """Put the sequences of a group into rows; in trees, what several share is computed once."""
    if layout is not Layout.tree:
        return [_row([placed]) for placed in learning]
    shared = [placed.shared for placed in learning]
    order = lexicographic_order(shared)
    parts = cut([shared[number] for number in order], max_tokens)
    return [_row([learning[number] for number in order[part]]) for part in parts]


def lay_out(
    rows_of_parts: Sequence[list[Row]],
    tokens: TokenSignals,
    fill: Callable[[list[Row]], list[list[Row]]],
    num_ranks: int,
) -> StepBatch:
    """Fill micro-batches with the rows of each part, balanced over the ranks.

    Args:
        tokens: the loss tokens of the step, to which the rows' `index` leads.
        fill: puts the rows of a rank into micro-batches.
    """
    # Every rank gets as many micro-batches in each part: an idle one joins the collectives with an empty batch.
    per_rank: list[list[list[Row]]] = [[] for _ in range(num_ranks)]
    optimizer_steps: list[range] = []
    for part_rows in [rows for rows in rows_of_parts if rows] or [[]]:
        filled = [fill(rank_rows) for rank_rows in _balance(part_rows, num_ranks)]
        most = max(1, *(len(batches) for batches in filled))
        optimizer_steps.append(range(len(per_rank[0]), len(per_rank[0]) + most))
        for batches, added in zip(per_rank, filled, strict=True):
            batches += [*added, *[[]] * (most - len(added))]
    return StepBatch(
        micro_batches=tuple(tuple(_collate(batch, tokens) for batch in batches) for batches in per_rank),
        optimizer_steps=tuple(optimizer_steps),
        num_tokens=len(tokens.targets),
    )


def _row(learning: Sequence[Placed]) -> Row:
    """Put sorted sequences into one row."""
    tree = PrefixTree.of([placed.shared for placed in learning])
    paths = list(zip(learning, tree.paths, strict=True))
    input_ids = np.empty(len(tree.depths), np.int32)
    for placed, path in paths:
        input_ids[path] = placed.input_ids
    return Row(
        input_ids=input_ids,
        position_ids=tree.depths,
        last=tree.last,
        sources=np.concatenate([path[placed.sources] for placed, path in paths]),
        index=join([placed.index for placed in learning], np.int32),
        # What several sequences share has the experts of the first of them: of the same weights, rounding may differ.
        routes=Routes.placed([(placed.routes, path) for placed, path in paths], len(input_ids)),
    )


def _balance(rows: list[Row], num_ranks: int) -> list[list[Row]]:
    """Give each row, longest first, to the rank with the fewest tokens."""
    per_rank: list[list[Row]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for row in sorted(rows, key=len, reverse=True):
        rank = tokens.index(min(tokens))
        per_rank[rank].append(row)
        tokens[rank] += len(row)
    return per_rank


def _joined(rows: list[Row], budget: int) -> list[list[Row]]:
    """Put rows end to end, the longest first, each where the least room is left (best fit). One beyond the budget is
    alone."""
    filled: list[list[Row]] = []
    rooms: list[int] = []
    for row in sorted(rows, key=len, reverse=True):
        fits = [(room, place) for place, room in enumerate(rooms) if room >= len(row)]
        if fits:
            place = min(fits)[1]
            filled[place].append(row)
            rooms[place] -= len(row)
        else:
            filled.append([row])
            rooms.append(budget - len(row))
    return [[Row.joined(together)] for together in filled]


def _padded(rows: list[Row], budget: int) -> list[list[Row]]:
    """Put rows of similar length together, as many as fit the budget with padding. One beyond the budget is alone."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=len, reverse=True):
        if batches and len(batches[-1][0]) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _collate(rows: list[Row], tokens: TokenSignals) -> MicroBatch:
    """Build a micro-batch. No rows give one padding token and no loss: an idle rank still joins the collectives."""
    length = max((len(row) for row in rows), default=1)
    shape = (max(len(rows), 1), length)
    is_plain = all(row.is_chain for row in rows)
    input_ids = np.zeros(shape, np.int64)
    # Padding too stays within the positions that the model has.
    position_ids = np.broadcast_to(np.arange(length), shape).copy()
    for number, row in enumerate(rows):
        input_ids[number, : len(row)] = row.input_ids
        position_ids[number, : len(row)] = row.position_ids
    index = join([row.index for row in rows], np.int64)
    routes = placed_routes(rows, range(0, length * len(rows), length), length * shape[0])
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        last=None if is_plain else rows[0].last[None].astype(np.int64),
        rows=join([np.full(len(row.index), number) for number, row in enumerate(rows)], np.int64),
        sources=join([row.sources for row in rows], np.int64),
        index=index,
        tokens=tokens.take(index).renumbered(),
        routes=None if routes is None else routes.experts.reshape(*shape, *routes.experts.shape[1:]),
    )
