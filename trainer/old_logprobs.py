"""Exact old logprobs (algorithm.proximal=exact): what the trainer says of a token under the weights that sampled it.

A replica that goes on through an update keeps the keys and values that older weights made. So the distribution that
sampled a token is not that of one version: each place of the sequence was computed by the version that sampled the
token after it. Here a batch is laid out such that a place has an owner, the version that computes it. Versions ascend
along a request, so the train workers compute a row in one segment per version, oldest first, each on top of the keys
and values before it, and every place once (`trainer.worker.segments`).

With mu from the engine and pi as it is before the step,

    log pi - log mu = (log pi - log own)         staleness: two versions, the trainer computes both
                    + (log own - log behaviour)  kept keys and values: one version, the trainer computes both
                    + (log behaviour - log mu)   mismatch: one version, trainer and engine

where `behaviour` is computed on the mixed keys and values, and `own` by the same version alone. The loss takes
`behaviour` as its proximal policy (arXiv:2605.12070 asks for it). `own` is only measured, and only of a share of the
sequences, because it takes a forward pass over the whole sequence for each version in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config, Layout
from configs.weight_sync import InFlightKv, PauseMode
from rollout.types import BoolArray, FloatArray, IntArray, Routes, TokenSequence, TrajectoryGroup, VersionSpan
from trainer.advantages.credit import keeps_idle
from trainer.batch import (
    Int64Array,
    MicroBatch,
    Placed,
    Row,
    first_versions,
    lay_out,
    learning_sequences,
    routes_of_inputs,
    rows_of,
)
from trainer.mini_batches import owning_groups
from trainer.tokens import TokenSignals, join, sampled_tokens

NOBODY = -1
"""The owner of a place that no version computes."""
MEASURED_SHARE = 8
"""One in so many of the requests that span an update is also computed by each of its versions alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """The places of a row that one version computes, with all that they attend to.

    Example, the row p q a b x, in which version 5 owns p q a, and version 6 owns b and x, which both follow p q a:
    version 6 computes two tokens and attends to five.
    """

    batch: MicroBatch
    """The row, without what its tokens do not attend to. Its targets are those that are predicted here, and their
    `sources` are places in `own`."""
    needed: Int64Array
    """[K] the places of these tokens in the whole row."""
    own: Int64Array
    """[Q] the places in `batch` of the tokens that are computed."""
    targets: Int64Array
    """[T] the places of the targets among those of the whole row."""
    is_idle: bool
    """True where the version computes nothing here. A single place is computed for nothing, because all ranks run the
    same collectives."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedRow:
    """A micro-batch of one row, whose places belong to several versions."""

    batch: MicroBatch
    owners: IntArray
    """[L] the version that computes each place."""
    oldest: IntArray
    """[T] the oldest version that has a part in each target's logprob."""

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(self.owners.tolist()) - {NOBODY}

    def segment(self, version: int) -> Segment:
        """Return the part of the row that the version computes. All older versions must have been computed."""
        batch, length = self.batch, len(self.owners)
        last = np.full(length, length - 1) if batch.last is None else batch.last[0]
        is_own = self.owners == version
        is_idle = not is_own.any()
        if is_idle:
            is_own = np.arange(length) == 0
        before = np.concatenate([[0], np.cumsum(is_own)])
        is_needed = before[last + 1] > before[:-1]  # something in its subtree is computed
        numbers = np.cumsum(is_needed) - 1
        targets = np.flatnonzero(is_own[batch.sources]) if not is_idle else np.empty(0, np.int64)
        row = replace(
            batch,
            input_ids=batch.input_ids[:, is_needed],
            position_ids=batch.position_ids[:, is_needed],
            routes=None if batch.routes is None else batch.routes[:, is_needed],
            last=None if batch.last is None else numbers[last[is_needed]][None],
            rows=np.zeros(len(targets), np.int64),
            sources=before[batch.sources[targets]],
            index=batch.index[targets],
            tokens=batch.tokens.take(targets),
        )
        needed, own = np.flatnonzero(is_needed), numbers[is_own]
        return Segment(batch=row, needed=needed, own=own, targets=targets, is_idle=is_idle)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedBatch:
    """The rows in which a step's tokens are computed by the versions that sampled them."""

    rows: tuple[tuple[MixedRow, ...], ...]
    """The rows of each rank. All have the same length, because every rank runs the same collectives."""
    versions: tuple[tuple[int, ...], ...]
    """The versions that own something in the rows of each place, ascending, on all ranks together."""
    num_tokens: int
    """Loss tokens of the step."""

    def gather(self, outputs: Sequence[Sequence[FloatArray]]) -> "OldLogprobs":
        """Put outputs [T] of each rank and row into the order of the step's loss tokens."""
        gathered = np.full(2 * self.num_tokens, np.nan, np.float32)
        wanted = np.zeros(2 * self.num_tokens, np.bool_)
        for rows, rank_outputs in zip(self.rows, outputs, strict=True):
            for row, output in zip(rows, rank_outputs, strict=True):
                gathered[row.batch.index], wanted[row.batch.index] = output, True
        behaviour, own = np.split(gathered, 2)
        is_wanted, _ = np.split(wanted, 2)
        return OldLogprobs(behaviour=behaviour, own=own, is_unknown=is_wanted & np.isnan(behaviour))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldLogprobs:
    """The logprobs of a step's loss tokens by the versions that sampled them, [T]."""

    behaviour: FloatArray
    """The logprobs by each token's own version, on the keys and values that it was sampled on. NaN where that is what
    the trainer computes now, or the weights are no longer there."""
    own: FloatArray
    """The logprobs by each token's own version alone, of some tokens that were sampled on the keys and values of
    others; else NaN."""
    is_unknown: BoolArray
    """True where the weights are no longer there: a run that was resumed has none of before."""

    @classmethod
    def none(cls, num_tokens: int) -> Self:
        """Return the scores of tokens for which nothing was computed."""
        nothing = np.full(num_tokens, np.nan, np.float32)
        return cls(behaviour=nothing, own=nothing, is_unknown=np.zeros(num_tokens, np.bool_))

    @property
    def kept_kv(self) -> FloatArray:
        """The part that comes from kept keys and values, of the tokens of which it was measured."""
        kept = self.own - self.behaviour
        return kept[~np.isnan(kept)]

    def signals(self, tokens: TokenSignals) -> TokenSignals:
        """Return the tokens with their `old_logprobs`, those from before included. Where they are unknown, mu takes
        their place, as with algorithm.proximal=rollout."""
        scored = self.behaviour
        if tokens.old_logprobs is not None:
            scored = np.where(np.isnan(scored), tokens.old_logprobs, scored)
        return replace(tokens, old_logprobs=np.where(self.is_unknown, tokens.rollout_logprobs, scored))


def old_metrics(parts: Sequence[OldLogprobs]) -> dict[str, float]:
    """Return the metrics of a step whose tokens were scored in parts."""
    metrics = {"staleness/unknown_tokens": float(sum(part.is_unknown.sum() for part in parts))}
    kept = join([part.kept_kv for part in parts], np.float64)
    if len(kept):
        metrics |= {
            "staleness/kept_kv_kl": float(-kept.mean()),
            "staleness/kept_kv_diff_mean": float(np.abs(kept).mean()),
            "staleness/kept_kv_diff_max": float(np.abs(kept).max()),
        }
    return metrics


@dataclass(slots=True, eq=False)
class EarlyScores:
    """The scores of groups that wait for the rest of their batch, while the trainer waits too.

    What an older version says of a token does not depend on the step that trains it. What the trainer's version says is
    left for the step: it costs nothing where the token is trained next.
    """

    config: Config
    _by_ordinal: dict[int, OldLogprobs] = field(default_factory=dict)

    def batch(
        self, ready: Sequence[TrajectoryGroup], global_steps: int
    ) -> tuple[list[TrajectoryGroup], MixedBatch | None]:
        """Return the groups that were not looked at before, and what is to be computed of them. Forget those that are
        no longer there."""
        for gone in self._by_ordinal.keys() - {group.prompt.ordinal for group in ready}:
            del self._by_ordinal[gone]
        groups = [group for group in ready if group.prompt.ordinal not in self._by_ordinal]
        if not groups:
            return [], None
        tokens = sampled_tokens(groups, global_steps)
        may_learn = [group.rewards_differ or keeps_idle(self.config.algorithm) for group in groups]
        learns = np.array(may_learn, np.float32)[owning_groups(groups, tokens)]
        return groups, mixed_batch(groups, replace(tokens, advantages=learns), self.config, global_steps)

    def add(self, groups: Sequence[TrajectoryGroup], scores: OldLogprobs | None) -> None:
        """Keep the scores of groups. None: there was nothing to compute."""
        ends = np.cumsum([_num_loss_tokens(group) for group in groups])
        scores = scores or OldLogprobs.none(int(ends[-1]))
        parts = zip(*(np.split(array, ends[:-1]) for array in (scores.behaviour, scores.own)), strict=True)
        for group, (behaviour, own) in zip(groups, parts, strict=True):
            is_unknown = np.zeros(len(own), np.bool_)  # the step tries again, and counts them
            known = OldLogprobs(behaviour=behaviour, own=own, is_unknown=is_unknown)
            self._by_ordinal[group.prompt.ordinal] = known

    def take(self, groups: Sequence[TrajectoryGroup]) -> OldLogprobs:
        """Return the scores of the groups of a step, and forget them."""
        parts: list[OldLogprobs] = []
        for group in groups:
            num_tokens = _num_loss_tokens(group)
            known = self._by_ordinal.pop(group.prompt.ordinal, None)
            # rollout.stale_policy=mask may have taken tokens away since.
            parts.append(known if known is not None and len(known.own) == num_tokens else OldLogprobs.none(num_tokens))
        return OldLogprobs(
            behaviour=join([part.behaviour for part in parts], np.float32),
            own=join([part.own for part in parts], np.float32),
            is_unknown=join([part.is_unknown for part in parts], np.bool_),
        )


def _num_loss_tokens(group: TrajectoryGroup) -> int:
    return sum(trajectory.num_loss_tokens for trajectory in group.trajectories)


def mixed_batch(
    groups: Sequence[TrajectoryGroup],
    tokens: TokenSignals,
    config: Config,
    global_steps: int,
    measured_share: int = MEASURED_SHARE,
) -> MixedBatch | None:
    """Lay out the tokens that other versions than the trainer's have a part in. None: there are none.

    Args:
        tokens: the loss tokens of `groups`. What has `old_logprobs` is not computed again.
        global_steps: the trainer's version.
    """
    trainer, sync = config.trainer, config.weight_sync
    keeps_kv = sync.in_flight_kv is InFlightKv.keep and sync.pause_mode is PauseMode.keep
    layout = Layout.tree if trainer.layout is Layout.tree else Layout.packed
    num_tokens = len(tokens.targets)
    is_known = np.zeros(num_tokens, np.bool_) if tokens.old_logprobs is None else ~np.isnan(tokens.old_logprobs)
    by_group: list[list[_Path]] = []
    num_spanning = 0
    for sequences in learning_sequences(groups, tokens, keep_idle=keeps_idle(config.algorithm)):
        paths: list[_Path] = []
        for sequence, first_token in sequences:
            for request in _requests(sequence, keeps_kv=keeps_kv):
                if all(span.global_steps == global_steps for span in request):
                    continue  # what the trainer computes now
                made = [path for path in _path(sequence, request, first_token) if not is_known[path.index].all()]
                paths += made
                num_spanning += len(request) > 1 and len(made)
                if len(request) > 1 and made and num_spanning % measured_share == 0:
                    alone = (_path(sequence, [span], first_token + num_tokens) for span in request[1:])
                    paths += chain.from_iterable(alone)
        by_group.append(_joined(paths))
    versions = np.unique(join([path.owners for paths in by_group for path in paths], np.int32))
    if not len(versions):
        return None
    # A place is a token and its owner: so a tree shares only what one version computed.
    size = max(int(path.input_ids.max()) for paths in by_group for path in paths) + 1
    rows = [row for paths in by_group for row in _rows(paths, versions, size, layout, trainer.tokens_per_micro_batch)]
    twice = tokens.take(np.tile(np.arange(num_tokens), 2))
    batch = lay_out(
        [rows], twice, lambda rows: _filled(rows, size, trainer.tokens_per_micro_batch), trainer.data_parallel
    )
    mixed = tuple(tuple(_mixed(one, versions, size) for one in mine) for mine in batch.micro_batches)
    at_places = zip(*mixed, strict=True)
    needed = tuple(tuple(sorted(set().union(*(row.versions for row in rows)))) for rows in at_places)
    return MixedBatch(rows=mixed, versions=needed, num_tokens=num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """The tokens of one request and all before it, as they were when it was sampled."""

    input_ids: IntArray
    owners: IntArray
    sources: NDArray[np.intp]
    index: NDArray[np.intp]
    routes: Routes | None

    def begins(self, other: "_Path") -> bool:
        """Return whether `other` goes on from this one."""
        length = len(self.input_ids)
        pairs = ((self.input_ids, other.input_ids), (self.owners, other.owners))
        return all(np.array_equal(mine, theirs[:length]) for mine, theirs in pairs)


def _requests(sequence: TokenSequence, *, keeps_kv: bool) -> Iterator[list[VersionSpan]]:
    """Yield the spans of what was sampled on one cache. A new request begins after tokens of an environment; its whole
    prompt is computed by the version that samples its first token, because no request reads keys and values of older
    weights.

    Args:
        keeps_kv: False if an update makes a request in flight begin anew.
    """
    request: list[VersionSpan] = []
    for span in sequence.spans:
        goes_on = keeps_kv and request and request[-1].end == span.start
        if request and not (goes_on and request[-1].global_steps <= span.global_steps):
            yield request
            request = []
        request.append(span)
    if request:
        yield request


def _path(sequence: TokenSequence, request: Sequence[VersionSpan], first_token: int) -> Iterator[_Path]:
    """Yield the path of a request, if it has loss tokens. A place belongs to the version that sampled the token after
    it, the prompt to that of the first one.

    Args:
        first_token: place of the sequence's first loss token.
    """
    prompt_length, start, end = len(sequence.prompt_ids), request[0].start, request[-1].end
    chosen = np.flatnonzero(sequence.loss_mask[start:end]) + start
    if not len(chosen):
        return
    owners = np.full(prompt_length + chosen[-1], request[0].global_steps, np.int32)
    for span in request[1:]:
        owners[prompt_length + span.start - 1 : prompt_length + span.end - 1] = span.global_steps
    index = first_token + np.cumsum(sequence.loss_mask)[chosen] - 1
    routes = routes_of_inputs(sequence, len(owners))
    if routes is not None:
        # What this request computed anew, other versions had sent elsewhere before: that is what the sequence keeps.
        routes = routes.where(first_versions(sequence)[: len(owners)] == owners)
    yield _Path(sequence.token_ids[: len(owners)], owners, prompt_length - 1 + chosen, index, routes)


def _joined(paths: list[_Path]) -> list[_Path]:
    """Join each path with the one after it where that goes on from it, as the turns of an episode under one version
    do."""
    joined = paths[:1]
    for before, path in pairwise(paths):
        if before.begins(path):
            last = joined.pop()
            path = replace(
                path,
                sources=np.concatenate([last.sources, path.sources]),
                index=np.concatenate([last.index, path.index]),
            )
        joined.append(path)
    return joined


def _rows(
    paths: Sequence[_Path], versions: NDArray[np.integer], size: int, layout: Layout, max_tokens: int
) -> list[Row]:
    """Put the paths of a group into rows whose `input_ids` are numbers of token and owner together."""
    if len(versions) * size > np.iinfo(np.int32).max:
        raise ValueError(f"{len(versions)} versions in a batch of a vocabulary of {size} are more than can be numbered")
    placed = [
        Placed(
            (np.searchsorted(versions, path.owners) * size + path.input_ids).astype(np.int32),
            path.sources,
            path.index,
            path.routes,
        )
        for path in paths
    ]
    return rows_of(placed, layout, max_tokens)


def _filled(rows: list[Row], size: int, budget: int) -> list[list[Row]]:
    """Put rows end to end, those that begin with the same version next to each other: the fewer versions a micro-batch
    has, the fewer are loaded for it. One row beyond the budget is alone."""
    filled: list[list[Row]] = []
    room = 0
    for row in sorted(rows, key=lambda row: (int(row.input_ids[0]) // size, -len(row))):
        if not filled or len(row) > room:
            filled.append([])
            room = budget
        filled[-1].append(row)
        room -= len(row)
    return [[Row.joined(together)] for together in filled]


def _mixed(batch: MicroBatch, versions: NDArray[np.integer], size: int) -> MixedRow:
    numbers, input_ids = np.divmod(batch.input_ids, size)
    owners = versions[numbers[0]].astype(np.int32)
    if not len(batch.index):  # the one place of an idle rank
        owners[:] = NOBODY
    # Owners ascend along a path, so the oldest one of a target is that of the first token of its tree.
    depths = batch.position_ids[0]
    firsts = np.maximum.accumulate(np.where(depths == 0, np.arange(len(depths)), 0))
    return MixedRow(batch=replace(batch, input_ids=input_ids), owners=owners, oldest=owners[firsts[batch.sources]])
