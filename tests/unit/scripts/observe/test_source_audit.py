"""What the records say of rows and of sources: each row once per epoch, the share of each source, its prompts once."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rollout.prompts import PromptStream
from rollout.types import TrajectoryGroup
from scripts.observe.audit import audit
from scripts.observe.source_audit import RowAudit, Share, SourceAudit, SourceCounts, shares_of
from tests.support.compose import changed
from tests.support.recorded_runs import CONFIG, groups_of, record, sample
from tests.support.rollouts import make_rows

SHARES = {
    "a": Share(weight=2, group_size=4, is_uniform=True),
    "b": Share(weight=1, group_size=2, is_uniform=True),
}


def take(audit: SourceAudit, *prompts: tuple[str, int], ordinal: int = 0, trained: bool = True) -> None:
    for number, (source, place) in enumerate(prompts, ordinal):
        audit.take(source, place, ordinal=number, row=place, trained=trained)


def test_a_source_that_is_a_group_away_from_its_share_is_found() -> None:
    audit = SourceAudit()
    take(audit, ("a", 0), ("a", 1))
    assert list(audit.findings_of_step(1, SHARES, prompts_per_step=2)) == [], "4/3 and 2/3 are due"
    take(audit, ("a", 2), ("a", 3), ordinal=2)
    assert list(audit.findings_of_step(2, SHARES, prompts_per_step=2)) == [
        "step 2: 4 groups of a were trained, its share is 2.67 (data.sources)",
        "step 2: 0 groups of b were trained, its share is 1.33 (data.sources)",
    ]


def test_prompts_of_a_source_that_were_skipped_or_are_two_are_found() -> None:
    audit = SourceAudit()
    take(audit, ("a", 0), ("a", 2), ("b", 0))
    take(audit, ("b", 1), ordinal=3, trained=False)
    take(audit, ("b", 0), ordinal=9)
    assert list(audit.findings(SHARES)) == [
        "prompts 2 and 9 are both number 0 of b (data.sources)",
        "1 prompts of a (data.sources) have not ended: 1",
    ]
    assert audit.counts()["a"] == SourceCounts(trained=2, discarded=0)


def test_a_config_says_what_each_source_promises() -> None:
    sources = {"a": {"weight": 3, "algorithm": {"group_size": 2}}, "b": {"data": {"curriculum": {"order": "retry"}}}}
    shares = shares_of(OmegaConf.structured(changed(CONFIG, data__sources=sources)))
    assert shares == {
        "a": Share(weight=3, group_size=2, is_uniform=True),
        "b": Share(weight=1, group_size=4, is_uniform=False),
    }


def of_sources(step: int) -> list[TrajectoryGroup]:
    """The first group of each step is of a, the second of b; what was discarded was of neither."""
    groups = groups_of(step)
    return [
        replace(group, prompt=replace(group.prompt, source=source, source_ordinal=step - 1, row=step - 1))
        for group, source in zip(groups, "ab", strict=True)
    ]


@pytest.mark.parametrize(
    ("sources", "findings"),
    [
        ({"a": {}, "b": {}}, []),
        ({"a": {"weight": 3}, "b": {}}, ["step 2: 2 groups of a were trained, its share is 3.00 (data.sources)"]),
        ({"a": {"algorithm": {"group_size": 3}}, "b": {}}, ["step 1: prompt 0 has trajectories [0, 1, 2, 3], algo"]),
    ],
)
def test_a_recorded_run_is_held_against_its_sources(
    sources: dict[str, object], findings: list[str], tmp_path: Path
) -> None:
    record(tmp_path, changed(CONFIG, data__sources=sources), groups_of=of_sources)
    sample(tmp_path)
    result = audit(tmp_path)
    for expected, found in zip(findings, result.findings[:1], strict=True):
        assert found.startswith(expected)
    assert result.sources == {source: SourceCounts(trained=4, discarded=0) for source in "ab"}
    assert "trained prompts by source: 4 of a, 4 of b" in result.sentence


# -- rows --------------------------------------------------------------------------------------------------------------


def row_findings(rows: dict[int, int], *, is_uniform: bool = True) -> list[str]:
    audit = RowAudit()
    for ordinal, row in rows.items():
        audit.take(ordinal, row)
        audit.take(ordinal, None)
    return list(audit.findings(is_uniform=is_uniform))


@given(num_rows=st.integers(1, 12), length=st.integers(0, 50), gaps=st.sets(st.integers(0, 49), max_size=5))
def test_a_uniform_run_has_no_finding_however_far_it_came(num_rows: int, length: int, gaps: set[int]) -> None:
    stream = PromptStream(make_rows(num_rows), seed=1)
    rows = {prompt.ordinal: prompt.row or 0 for prompt in (stream.next() for _ in range(length))}
    assert row_findings({ordinal: row for ordinal, row in rows.items() if ordinal not in gaps}) == []


@pytest.mark.parametrize("is_uniform", [True, False])
def test_a_row_that_comes_twice_in_an_epoch_is_found_where_none_may(is_uniform: bool) -> None:
    rows = {0: 2, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    expected = ["prompts 4 and 5 of one epoch are both of row 2 of the data"]
    assert row_findings(rows, is_uniform=is_uniform) == (expected if is_uniform else [])


def test_an_ordinal_that_stands_for_two_rows_is_found() -> None:
    audit = RowAudit()
    audit.take(3, 1)
    audit.take(3, 4)
    assert list(audit.findings(is_uniform=False)) == ["prompt 3 is of the rows 1, 4 of the data"]
