"""Several sources in one run: each has its share of the trained groups whatever it does, and the bound holds."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import StalePolicy
from rollout.failures import FailureBudget, GroupFailuresError
from rollout.mixture import MixedLedger, Turns
from rollout.snapshot import LostPromptsError, restore
from rollout.staleness import StalenessWindow
from rollout.types import Prompt
from tests.support.fakes import run_virtual
from tests.support.mixtures import MadeSource, MixedRun

weights_of_sources = st.dictionaries(
    st.sampled_from("abcd"), st.sampled_from([1, 2, 3, 0.1, 0.25, 7.5]), min_size=1, max_size=4
)


# -- turns -------------------------------------------------------------------------------------------------------------


def test_turns_follow_the_weights() -> None:
    turns = Turns({"A": 2, "B": 1})
    places = {source: [turns.place(source, number) for number in range(4)] for source in "AB"}
    assert places == {"A": [0, 1, 3, 4], "B": [2, 5, 8, 11]}
    assert [turns.groups("A", total) for total in range(7)] == [0, 1, 2, 2, 3, 4, 4]


@settings(max_examples=150, deadline=None)
@given(weights_of_sources, st.integers(0, 300))
def test_of_any_number_of_groups_each_source_has_its_share_rounded_down_or_up(
    weights: dict[str, float], total: int
) -> None:
    turns = Turns(weights)
    counts = {source: turns.groups(source, total) for source in weights}
    assert sum(counts.values()) == total
    for source, number in counts.items():
        assert abs(number - total * turns.share(source)) < 1
        assert turns.groups(source, turns.place(source, number)) == number, "the group is dealt at its place"
        assert turns.groups(source, turns.place(source, number) + 1) == number + 1


# -- whole runs --------------------------------------------------------------------------------------------------------

lists_of_seconds = st.lists(st.sampled_from([0.0, 0.5, 3.0, 40.0]), min_size=1, max_size=5)
mostly_not = st.lists(st.booleans(), min_size=1, max_size=5).filter(lambda some: not all(some))
made_sources = st.dictionaries(
    st.sampled_from(["math", "agent", "search"]),
    st.builds(
        MadeSource,
        weight=st.sampled_from([1, 2, 0.3, 5]),
        group_size=st.integers(2, 5),
        seconds=lists_of_seconds,
        is_flat=mostly_not,
        fails=mostly_not,
        num_rows=st.integers(1, 5),
    ),
    min_size=1,
    max_size=3,
).filter(lambda sources: not any(all(map(max, s.is_flat * 12, s.fails * 12)) for s in sources.values()))


def check_shares(runs: list[MixedRun]) -> None:
    """Each batch is full and fresh, and after each a source is within a group of its share."""
    first = runs[0]
    trained: Counter[str] = Counter()
    total = sum(source.weight for source in first.sources.values())
    for step, batch in enumerate(batch for run in runs for batch in run.batches):
        assert len(batch.groups) == first.groups_per_step
        trained.update(group.prompt.source for group in batch.groups)
        for group in batch.groups:
            assert first.window.is_fresh(group.min_version, step)
            assert len(group.trajectories) == first.sources[group.prompt.source].group_size
            assert group.rewards_differ
        assert batch.trained == {name: trained[name] for name in first.sources}, "a resumed run goes on counting"
        for name, source in first.sources.items():
            assert abs(trained[name] - (step + 1) * first.groups_per_step * source.weight / total) < 1


def check_once(ended: list[Prompt], first: MixedRun) -> None:
    """Each ordinal, and each place in a source, is over once, and none was skipped."""
    assert sorted(prompt.ordinal for prompt in ended) == list(range(len(ended)))
    for name, source in first.sources.items():
        mine = sorted(prompt.source_ordinal for prompt in ended if prompt.source == name)
        assert mine == list(range(len(mine)))
        rows = Counter(prompt.text for prompt in ended if prompt.source == name)
        assert max(rows.values(), default=0) - min(rows.values(), default=0) <= 1 or len(rows) < source.num_rows
        assert max(rows.values(), default=0) <= len(mine) // source.num_rows + 1, "each row once per epoch of its own"


@settings(max_examples=80, deadline=None)
@given(
    made_sources,
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
    st.sampled_from([0.0, 2.0]),
)
def test_a_source_keeps_its_share_however_slow_filtered_or_broken_it_is(
    sources: dict[str, MadeSource], groups_per_step: int, max_staleness: int, interval: int, train_s: float
) -> None:
    run = MixedRun(sources, groups_per_step, max_staleness, interval, train_s=train_s)
    run_virtual(run.until(run.num_steps))
    check_shares([run])
    check_once([*run.trained, *run.discarded], run)
    assert run.runner.sizes.keys() <= {(name, source.group_size) for name, source in sources.items()}
    assert run.rollouter.fleet.router.gauges()["rollout/inflight_trajectories"] == 0, "all room is given back"


@settings(max_examples=60, deadline=None)
@given(
    made_sources,
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.integers(1, 7), max_size=3, unique=True).map(sorted),
)
def test_cut_anywhere_the_sources_go_on_where_they_were(
    sources: dict[str, MadeSource], groups_per_step: int, max_staleness: int, cuts: list[int]
) -> None:
    async def main() -> list[MixedRun]:
        runs: list[MixedRun] = []
        state = None
        for start, end in zip([0, *cuts], [*cuts, 8], strict=True):
            run = MixedRun(sources, groups_per_step, max_staleness, global_steps=start)
            if state is not None:
                assert restore(state, run.rollouter) == 0, "everything fits"
                assert run.stream.ordinals == {name: source.next_ordinal for name, source in state.sources.items()}
                could = runs[-1].last_turn is not None
                assert not could or run.buffer.ledger.turn is not None, "what could be claimed still can"
            state = await run.until(end)
            runs.append(run)
        return runs

    runs = run_virtual(main())
    check_shares(runs)
    check_once([prompt for run in runs for prompt in (*run.trained, *run.discarded)], runs[0])


@pytest.mark.parametrize("policy", [StalePolicy.mask, StalePolicy.drop])
async def test_the_other_policies_keep_the_shares_too(policy: StalePolicy) -> None:
    slow = MadeSource(weight=1, seconds=[0.5, 9.0], group_size=3)
    run = MixedRun({"quick": MadeSource(weight=2), "slow": slow}, policy=policy, num_steps=6)
    await run.until(6)
    counts = Counter(prompt.source for prompt in run.trained)
    assert counts == {"quick": 12, "slow": 6}
    assert run.buffer.discarded["slow"] == run.buffer.ledger.num_dropped
    assert (run.buffer.ledger.num_dropped > 0) == (policy is StalePolicy.drop)


# -- small things ------------------------------------------------------------------------------------------------------


def test_claims_take_turns_and_a_replacement_comes_first() -> None:
    window = StalenessWindow(groups_per_step=3, max_staleness=1)
    ledger = MixedLedger({"A": 2, "B": 1}, window, StalePolicy.wait, total_steps=9)
    slots = []
    while (source := ledger.turn) is not None:
        slots.append(ledger.claim(source))
    assert "".join(slot.source for slot in slots) == "AABAAB"
    ledger.give_back(slots[2])
    assert ledger.turn == "B", "a group of B was filtered out"
    assert ledger.select(0) is None
    for slot in slots[:2]:
        ledger.finish(slot, 0)
    assert ledger.select(0) is None and ledger.lacking(0) == ["B"], "both of A are there, and are not taken"
    assert ledger.num_ready == 2


async def test_errors_name_the_source() -> None:
    broken = {"fine": MadeSource(), "broken": MadeSource(fails=[True])}
    run = MixedRun(broken, failures=FailureBudget(num_groups=100, max_failed_groups=0.02))
    with pytest.raises(ExceptionGroup) as caught:
        await run.until(8)
    error = caught.value.exceptions[0]
    assert isinstance(error, GroupFailuresError) and " of broken: OSError: broken broke" in str(error)
    slow = MixedRun({"fine": MadeSource(), "slow": MadeSource(seconds=[1e4])}, batch_timeout_s=50.0)
    with pytest.raises(TimeoutError, match=r"_timeout_s=50.0: it waits for groups of slow \(data.sources\); 3 groups"):
        await slow.until(8)


async def test_a_checkpoint_that_has_lost_a_prompt_of_a_source_is_refused() -> None:
    sources: dict[str, Any] = {"a": MadeSource(seconds=[1.0, 9.0]), "b": MadeSource()}
    first = MixedRun(sources)
    state = await first.until(3)
    state.sources["a"], state.sources["b"] = state.sources["b"], state.sources["a"]
    with pytest.raises(LostPromptsError, match=r"data\.sources\.[ab]: the rollouts of the checkpoint account for"):
        restore(state, MixedRun(sources, global_steps=3).rollouter)


async def test_another_weight_from_a_checkpoint_on() -> None:
    """What was begun of a source that has too much of it now is given back, and its prompts come first."""
    first = MixedRun({"a": MadeSource(seconds=[9.0]), "b": MadeSource()}, groups_per_step=4, max_staleness=2)
    state = await first.until(3)
    again = {"a": MadeSource(weight=1), "b": MadeSource(weight=3)}
    second = MixedRun(again, groups_per_step=4, max_staleness=2, global_steps=3)
    restore(state, second.rollouter)
    await second.until(8)
    counts = Counter(prompt.source for prompt in second.trained)
    assert counts == {"a": 5, "b": 15}
    ended = [prompt.ordinal for run in (first, second) for prompt in run.trained]
    assert len(set(ended)) == len(ended)
