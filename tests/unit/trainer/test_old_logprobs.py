"""Which version computes which place of a row, and in which segments."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.algorithm import Proximal
from configs.schema import AlgorithmConfig, Config, Layout, RolloutConfig, TrainerConfig
from configs.validate import ConfigError
from configs.weight_sync import InFlightKv, PauseMode, WeightSyncConfig
from rollout.buffer import mask_stale
from rollout.types import FloatArray, TrajectoryGroup, VersionSpan
from tests.support.reference import make_group, make_trajectory
from trainer.batch import StepBatch
from trainer.old_logprobs import EarlyScores, MixedBatch, MixedRow, OldLogprobs, mixed_batch, old_metrics
from trainer.step import StepAssembler
from trainer.tokens import TokenSignals, sampled_tokens

NOW = 9
CONFIG = Config(
    algorithm=AlgorithmConfig(proximal=Proximal.exact),
    rollout=RolloutConfig(max_staleness=4),
    trainer=TrainerConfig(layout=Layout.packed),
)


def laid_out(groups: Sequence[TrajectoryGroup], config: Config = CONFIG, share: int = 10**9) -> MixedBatch:
    mixed = mixed_batch(groups, signals(groups), config, NOW, share)
    assert mixed is not None
    return mixed


def signals(groups: Sequence[TrajectoryGroup]) -> TokenSignals:
    tokens = sampled_tokens(groups, NOW)
    return replace(tokens, advantages=np.ones_like(tokens.advantages))


def sampled(*spans: tuple[int, int, int], prompt: Sequence[int] = (1, 2), first: int = 10) -> TrajectoryGroup:
    """A group of one response of the tokens `first`, `first` + 1 and so on."""
    length = max(end for _, end, _ in spans)
    loss_mask = np.zeros(length, np.bool_)
    for start, end, _ in spans:
        loss_mask[start:end] = True
    response = list(range(first, first + length))
    made = tuple(VersionSpan(*span) for span in spans)
    return make_group(0, [make_trajectory(prompt, response, loss_mask=loss_mask, spans=made)])


def paths(row: MixedRow) -> dict[int, list[tuple[int, int]]]:
    """Return for each target's place in the step the (token, owner) of all that it depends on, by following `last`."""
    length, found = len(row.owners), {}
    last = np.full(length, length - 1) if row.batch.last is None else row.batch.last[0]
    for source, index in zip(row.batch.sources.tolist(), row.batch.index.tolist(), strict=True):
        on_path = [place for place in range(source + 1) if last[place] >= source]
        found[index] = [(int(row.batch.input_ids[0, place]), int(row.owners[place])) for place in on_path]
    return found


def test_a_place_belongs_to_the_version_that_sampled_the_token_after_it() -> None:
    mixed = laid_out([sampled((0, 2, 6), (2, 3, 8), (3, 5, NOW))])
    [[row]] = mixed.rows
    assert row.batch.input_ids.tolist() == [[1, 2, 10, 11, 12, 13]]
    assert row.owners.tolist() == [6, 6, 6, 8, NOW, NOW]
    assert row.oldest.tolist() == [6] * 5
    assert mixed.versions == ((6, 8, NOW),)


def test_a_new_turn_is_a_new_request() -> None:
    """Its prompt, the turn before included, is computed by the version that samples its first token."""
    mixed = laid_out([sampled((0, 2, 6), (3, 5, 8))])
    whole = {index: path for row in mixed.rows[0] for index, path in paths(row).items()}
    assert whole[1] == [(1, 6), (2, 6), (10, 6)]
    assert whole[3] == [(1, 8), (2, 8), (10, 8), (11, 8), (12, 8), (13, 8)]


def test_turns_of_one_version_are_one_row() -> None:
    mixed = laid_out([sampled((0, 2, 6), (3, 5, 6))])
    [[row]] = mixed.rows
    assert row.batch.input_ids.tolist() == [[1, 2, 10, 11, 12, 13]] and row.batch.index.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "sync", [WeightSyncConfig(in_flight_kv=InFlightKv.recompute), WeightSyncConfig(pause_mode=PauseMode.abort)]
)
def test_an_update_begins_a_request_anew_where_no_keys_and_values_are_kept(sync: WeightSyncConfig) -> None:
    mixed = laid_out([sampled((0, 2, 6), (2, 3, 8))], replace(CONFIG, weight_sync=sync))
    whole = {index: path for row in mixed.rows[0] for index, path in paths(row).items()}
    assert whole[2] == [(1, 8), (2, 8), (10, 8), (11, 8)]


def test_a_replica_with_older_weights_that_goes_on_begins_anew() -> None:
    mixed = laid_out([sampled((0, 2, 8), (2, 3, 6))])
    whole = {index: path for row in mixed.rows[0] for index, path in paths(row).items()}
    assert {owner for _, owner in whole[2]} == {6}


def test_what_the_trainer_computes_now_is_left_out() -> None:
    groups = [sampled((0, 4, NOW))]
    assert mixed_batch(groups, signals(groups), CONFIG, NOW) is None
    mixed = laid_out([sampled((0, 2, 6), (3, 5, NOW)), sampled((0, 4, NOW))])
    assert [row.batch.index.tolist() for row in mixed.rows[0]] == [[0, 1]]
    old = mixed.gather([[np.array([-1, -2], np.float32)]])
    assert np.isnan(old.behaviour).tolist() == [False, False, *[True] * 6] and not old.is_unknown.any()


def test_what_learns_nothing_is_left_out() -> None:
    groups = [sampled((0, 3, 6)), sampled((0, 3, 7))]
    tokens = sampled_tokens(groups, NOW)
    tokens = replace(tokens, advantages=np.where(tokens.trajectories == 1, 1, 0).astype(np.float32))
    mixed = mixed_batch(groups, tokens, CONFIG, NOW)
    assert mixed is not None and mixed.versions == ((7,),)


def test_a_tree_shares_what_the_same_version_computed() -> None:
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, layout=Layout.tree))
    prompt = (1, 2, 3, 4)
    spans = [[(0, 3, 6)], [(0, 3, 6)], [(0, 2, 7), (2, 3, 8)]]
    trajectories = [
        sampled(*some, prompt=prompt, first=10 * place).trajectories[0] for place, some in enumerate(spans, 1)
    ]
    mixed = laid_out([make_group(0, trajectories)], config)
    [[row]] = mixed.rows
    assert row.batch.input_ids.size == (4 + 2 + 2) + (4 + 2), "the prompt once by version 6, and once by version 7"


def test_every_eighth_spanning_request_is_measured() -> None:
    groups = [sampled((0, 2, 6), (2, 4, 7)) for _ in range(4)]
    mixed = laid_out(groups, share=2)
    outputs = [[np.full(len(row.batch.index), -float(place)) for place, row in enumerate(rows)] for rows in mixed.rows]
    old = mixed.gather(outputs)
    measured = ~np.isnan(old.own)
    assert measured.tolist() == [False] * 6 + [True] * 2 + [False] * 6 + [True] * 2
    for row in mixed.rows[0]:
        for index, path in paths(row).items():
            if index >= mixed.num_tokens:
                assert {owner for _, owner in path} == {7}


def test_tokens_of_weights_that_are_gone_are_unknown_and_have_mu() -> None:
    groups = [sampled((0, 2, 6))]
    tokens = replace(signals(groups), rollout_logprobs=np.array([-3, -4], np.float32))
    old = OldLogprobs(
        behaviour=np.array([np.nan, np.nan], np.float32),
        own=np.full(2, np.nan, np.float32),
        is_unknown=np.array([True, False]),
    )
    scored = old.signals(tokens).old_logprobs
    assert scored is not None and scored[0] == -3 and np.isnan(scored[1])
    assert old_metrics([old]) == {"staleness/unknown_tokens": 1}


def test_an_idle_rank_computes_nothing_of_any_version() -> None:
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, num_ranks=2))
    mixed = laid_out([sampled((0, 2, 6))], config)
    [[row], [idle]] = mixed.rows
    assert mixed.versions == ((6,),) and idle.versions == frozenset()
    segment = idle.segment(6)
    assert segment.is_idle and segment.own.tolist() == [0] and not len(segment.targets)
    assert not row.segment(6).is_idle


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_segments_compute_every_place_once_on_top_of_those_that_it_needs(data: st.DataObject) -> None:
    """Whatever the layout: a segment's own tokens attend to their own path, which older segments have computed."""
    layout = data.draw(st.sampled_from(list(Layout)))
    budget = data.draw(st.sampled_from([1, 16, 1000]))
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, layout=layout, tokens_per_micro_batch=budget))
    groups = []
    for _ in range(data.draw(st.integers(1, 3))):
        trajectories = []
        for _ in range(data.draw(st.integers(1, 4))):
            cuts = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(5, NOW), st.booleans()), min_size=1))
            spans, end, version = list[tuple[int, int, int]](), 0, 0
            for length, version, has_gap in cuts:
                end += has_gap
                spans.append((end, end + length, version))
                end += length
            first = data.draw(st.integers(3, 4))
            trajectories.append(sampled(*spans, prompt=(1, 1, 2), first=first).trajectories[0])
        groups.append(make_group(len(groups), trajectories))
    mixed = mixed_batch(groups, signals(groups), config, NOW, 2)
    if mixed is None:
        return
    for row, versions in zip(mixed.rows[0], mixed.versions, strict=True):
        assert list(versions) == sorted(row.versions)
        whole, computed, seen = paths(row), set[int](), dict[int, list[tuple[int, int]]]()
        for version in versions:
            segment = row.segment(version)
            own = segment.needed[segment.own]
            assert not computed & set(own.tolist()) and (row.owners[own] == version).all()
            computed |= set(own.tolist())
            assert set(segment.needed.tolist()) <= computed, "keys and values that nobody has computed yet"
            inside = replace(
                row,
                batch=replace(segment.batch, sources=segment.own[segment.batch.sources]),
                owners=row.owners[segment.needed],
            )
            assert segment.batch.tokens.targets.tolist() == row.batch.tokens.targets[segment.targets].tolist()
            seen |= paths(inside)
        assert seen == whole
        for source, oldest, index in zip(row.batch.sources, row.oldest, row.batch.index, strict=True):
            owners = [owner for _, owner in whole[int(index)]]
            assert owners == sorted(owners) and owners[0] == oldest and owners[-1] == row.owners[source]


def scores_of(mixed: MixedBatch, version: float) -> OldLogprobs:
    return mixed.gather([[np.full(len(row.batch.index), version, np.float32) for row in rows] for rows in mixed.rows])


def test_a_group_that_waits_is_scored_once_and_the_step_computes_the_rest() -> None:
    """The first group waits for the second. What version 9 sampled alone in the first is left for the step, which takes
    place at version 10."""
    waiting, last = sampled((0, 2, 6), (3, 5, NOW)), replace_ordinal(sampled((0, 2, 7)), 1)
    early = EarlyScores(CONFIG)
    rewarded = replace_rewards(waiting)
    groups, mixed = early.batch([rewarded], NOW)
    assert groups == [rewarded] and mixed is not None
    early.add(groups, scores_of(mixed, -1))
    assert early.batch([rewarded], NOW) == ([], None)
    known = early.take([rewarded, last])
    assert known.behaviour[:2].tolist() == [-1, -1] and np.isnan(known.behaviour[2:]).all()
    tokens = known.signals(signals([rewarded, last]))
    rest = mixed_batch([rewarded, last], tokens, CONFIG, NOW + 1)
    assert rest is not None
    assert sorted(np.concatenate([row.batch.index for row in rest.rows[0]]).tolist()) == [2, 3, 4, 5]
    scored = scores_of(rest, -2).signals(tokens).old_logprobs
    assert scored is not None and scored.tolist() == [-1, -1, -2, -2, -2, -2]


def test_groups_that_are_gone_are_forgotten_and_those_that_teach_nothing_are_not_computed() -> None:
    group = sampled((0, 2, 6))  # its only reward differs from no other
    early = EarlyScores(CONFIG)
    groups, mixed = early.batch([group], NOW)
    assert groups == [group] and mixed is None
    early.add(groups, None)
    assert early.batch([group], NOW) == ([], None)
    assert early.batch([], NOW) == ([], None)
    assert early.batch([group], NOW)[0] == [group]


def test_tokens_that_were_masked_since_are_computed_again() -> None:
    group = replace_rewards(sampled((0, 2, 6), (2, 4, 7)))
    early = EarlyScores(CONFIG)
    groups, mixed = early.batch([group], NOW)
    assert mixed is not None
    early.add(groups, scores_of(mixed, -1))
    masked = mask_stale_group(group)
    known = early.take([masked])
    assert len(known.behaviour) < mixed.num_tokens and np.isnan(known.behaviour).all()


def replace_ordinal(group: TrajectoryGroup, ordinal: int) -> TrajectoryGroup:
    return replace(group, prompt=replace(group.prompt, ordinal=ordinal))


def replace_rewards(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return the group with a second trajectory, of another reward, without tokens."""
    silent = replace(group.trajectories[0], sequences=(), reward=1.0)
    return replace(group, trajectories=(*group.trajectories, silent))


def mask_stale_group(group: TrajectoryGroup) -> TrajectoryGroup:
    return replace(group, trajectories=tuple(mask_stale(t, lambda version: version > 6) for t in group.trajectories))


async def no_score(batch: StepBatch) -> dict[str, FloatArray]:
    raise AssertionError("nothing of this needs scores")


def test_what_was_recorded_is_trained_again_and_computed_by_nobody() -> None:
    """A replay has other versions than the run, and so takes what the run's own said."""
    assembler = StepAssembler(config=CONFIG, score=no_score)
    groups = [make_group(0, [replace(t, reward=float(i)) for i, t in enumerate(sampled((0, 3, 6)).trajectories * 2)])]
    recorded = np.arange(6, dtype=np.float32)
    assembled = asyncio.run(assembler.assemble(groups, NOW, recorded=recorded))
    assert assembled.batch is not None
    trained = [batch.tokens.old_logprobs for batch in assembled.batch.micro_batches[0]]
    assert sorted(np.concatenate([some for some in trained if some is not None]).tolist()) == recorded.tolist()
    with pytest.raises(ConfigError, match="algorithm.proximal=exact: the versions that sampled"):
        asyncio.run(assembler.assemble(groups, NOW))
