"""What the records say of each source: its share, and each of its prompts once."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rollout.types import TrajectoryGroup
from scripts.observe.audit import audit
from scripts.observe.source_audit import Share, SourceAudit, SourceCounts, shares_of
from tests.support.compose import changed
from tests.support.recorded_runs import CONFIG, groups_of, record, sample

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
