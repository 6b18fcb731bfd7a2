"""From trajectory groups to micro-batches: laid out, balanced over ranks, packed by a token budget.

Pure numpy: the driver builds batches, the workers only turn them into tensors. The same loss and gradient come out of
any layout, budget and number of ranks, because each token carries all that it needs and the loss is divided by the
global number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.schema import Layout
from rollout.types import FloatArray, IntArray, Trajectory, TrajectoryGroup

PADDING = -1
PROMPT = 0
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One row of a micro-batch: a prompt with one response (padded layout) or with several (shared prompt).

    Example, prompt [p q] with responses [a b] and [x y z]; the last token of a response is only ever a target:
        input_ids    p q a x y
        position_ids 0 1 2 2 3
        segment_ids  0 0 1 2 2
        sources      1 2 1 3 4    (where the prediction of each target is read)
        targets      a b x y z
    """

    input_ids: IntArray  # [L]
    position_ids: IntArray  # [L]
    segment_ids: IntArray  # [L] 0 prompt, j the j-th response
    sources: IntArray  # [T]
    targets: IntArray  # [T] tokens of the loss mask
    advantages: FloatArray  # [T]
    rollout_logprobs: FloatArray  # [T]

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """What one forward and backward computes. Rows are padded on the right to the longest."""

    input_ids: Int64Array  # [N, L]
    position_ids: Int64Array  # [N, L]
    segment_ids: IntArray | None  # [N, L], -1 padding; None: every row is one sequence, plain causal attention
    rows: Int64Array  # [T] the row of every loss token
    sources: Int64Array  # [T] the position whose output predicts it
    targets: Int64Array  # [T]
    advantages: FloatArray  # [T]
    rollout_logprobs: FloatArray  # [T]

    @property
    def num_padded_tokens(self) -> int:
        return self.input_ids.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """All micro-batches of one optimizer step."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    """Per rank; every rank has the same number, because each runs the same collectives."""
    num_loss_tokens: int
    """Over all ranks, also those of trajectories left out for having no gradient: what the loss is divided by."""


def assemble(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[FloatArray],
    *,
    layout: Layout,
    num_ranks: int,
    tokens_per_micro_batch: int,
) -> StepBatch:
    """`advantages`: one array [G] per group. Trajectories with advantage 0 have no gradient and are not computed."""
    num_loss_tokens = sum(int(t.loss_mask.sum()) for group in groups for t in group.trajectories)
    rows: list[Row] = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        learning = [
            (trajectory, float(advantage))
            for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True)
            if advantage != 0 and trajectory.loss_mask.any()
        ]
        if layout is Layout.padded:
            rows += [_row([pair]) for pair in learning]
        elif learning:
            rows.append(_row(learning))
    per_rank = [_pack(rank_rows, tokens_per_micro_batch) for rank_rows in _balance(rows, num_ranks)]
    most = max(1, *(len(batches) for batches in per_rank))
    micro_batches = tuple(
        tuple(_collate(batch, layout) for batch in [*batches, *[[]] * (most - len(batches))]) for batches in per_rank
    )
    return StepBatch(micro_batches=micro_batches, num_loss_tokens=max(num_loss_tokens, 1))


def _row(learning: list[tuple[Trajectory, float]]) -> Row:
    """Trajectories of one prompt, with their advantages, in one row."""
    prompt_ids = learning[0][0].prompt_ids
    num_prompt = len(prompt_ids)
    ids, positions = [prompt_ids], [np.arange(num_prompt)]
    segments = [np.full(num_prompt, PROMPT)]
    sources, targets, advantages, logprobs = [], [], [], []
    offset = num_prompt
    for segment, (trajectory, advantage) in enumerate(learning, 1):
        inputs = trajectory.response_ids[:-1]
        ids.append(inputs)
        positions.append(num_prompt + np.arange(len(inputs)))
        segments.append(np.full(len(inputs), segment))
        # The first response token is predicted at the prompt's end, every later one at the token before it.
        source = np.concatenate([[num_prompt - 1], offset + np.arange(len(inputs))])
        mask = trajectory.loss_mask
        sources.append(source[mask])
        targets.append(trajectory.response_ids[mask])
        advantages.append(np.full(int(mask.sum()), advantage))
        logprobs.append(trajectory.rollout_logprobs[mask])
        offset += len(inputs)
    return Row(
        input_ids=np.concatenate(ids).astype(np.int32),
        position_ids=np.concatenate(positions).astype(np.int32),
        segment_ids=np.concatenate(segments).astype(np.int32),
        sources=np.concatenate(sources).astype(np.int32),
        targets=np.concatenate(targets).astype(np.int32),
        advantages=np.concatenate(advantages).astype(np.float32),
        rollout_logprobs=np.concatenate(logprobs).astype(np.float32),
    )


def _balance(rows: list[Row], num_ranks: int) -> list[list[Row]]:
    """Longest first, each to the rank with the fewest tokens so far."""
    per_rank: list[list[Row]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for row in sorted(rows, key=len, reverse=True):
        rank = tokens.index(min(tokens))
        per_rank[rank].append(row)
        tokens[rank] += len(row)
    return per_rank


def _pack(rows: list[Row], budget: int) -> list[list[Row]]:
    """Rows of like length together, as many as fit the budget of padded tokens; a longer row goes alone."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=len, reverse=True):
        if batches and len(batches[-1][0]) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _collate(rows: list[Row], layout: Layout) -> MicroBatch:
    """No rows give one padding token and no loss: a rank without work still takes part in the collectives."""
    length = max((len(row) for row in rows), default=1)
    shape = (max(len(rows), 1), length)
    input_ids = np.zeros(shape, np.int64)
    position_ids = np.broadcast_to(np.arange(length), shape).copy()
    segment_ids = np.full(shape, PADDING, np.int32)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = row.input_ids
        position_ids[index, : len(row)] = row.position_ids
        segment_ids[index, : len(row)] = row.segment_ids
    row_of_token = [np.full(len(row.targets), index) for index, row in enumerate(rows)]
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        segment_ids=segment_ids if layout is Layout.shared_prompt else None,
        rows=_join(row_of_token, np.int64),
        sources=_join([row.sources for row in rows], np.int64),
        targets=_join([row.targets for row in rows], np.int64),
        advantages=_join([row.advantages for row in rows], np.float32),
        rollout_logprobs=_join([row.rollout_logprobs for row in rows], np.float32),
    )


def _join(arrays: list[NDArray], dtype: type) -> NDArray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)
