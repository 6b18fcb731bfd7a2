"""An update tries the right replicas together, and often enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.checkpoint_manager import Retries

Attempt = tuple[str, str | None]
"""(replicas that fail, the one whose failure stops the sending)"""
WELL: Attempt = ("", None)


@pytest.mark.parametrize(
    ("attempts", "tried", "missed"),
    [
        ([WELL], ["abc"], ""),
        ([("b", None), WELL], ["abc", "b"], ""),
        ([("b", None), ("b", None)], ["abc", "b"], "b"),
        ([("abc", None), WELL], ["abc", "abc"], ""),
        ([("abc", "b"), WELL, WELL], ["abc", "ac", "b"], ""),
        ([("abc", "b"), ("ac", "c"), WELL, WELL, WELL], ["abc", "ac", "a", "b", "c"], ""),
        ([("ab", "b"), WELL, ("b", "b")], ["abc", "a", "b"], "b"),
        ([("ab", "b"), ("a", "a"), ("b", "b"), ("a", "a")], ["abc", "a", "b", "a"], "ba"),
    ],
    ids=["none", "once", "twice", "the trainer", "one stops all", "one after another", "stops and misses", "two miss"],
)
def test_a_replica_is_tried_once_more_after_those_that_it_made_fail(
    attempts: list[Attempt], tried: list[str], missed: str
) -> None:
    retries, groups, found = Retries("abc"), [], []
    for group, (failed, stopped_by) in zip(retries, attempts, strict=True):
        groups.append("".join(sorted(group)))
        found += sorted(retries.record(set(failed), stopped_by))
    assert (groups, found) == (tried, list(missed))


@given(names=st.sets(st.sampled_from("abcdef"), min_size=1), data=st.data())
def test_whatever_fails_every_replica_is_served_or_missed_and_has_two_tries_of_its_own(
    names: set[str], data: st.DataObject
) -> None:
    retries, served, missed, own_failures = Retries(names), set[str](), set[str](), dict.fromkeys(names, 0)
    for group in retries:
        failed = data.draw(st.sets(st.sampled_from(sorted(group))))
        stopped_by = data.draw(st.sampled_from([None, *sorted(failed)]))
        for name in failed if stopped_by is None else {stopped_by}:
            own_failures[name] += 1
        served |= group - failed
        missed |= retries.record(failed, stopped_by)
    assert served | missed == names and not served & missed
    assert all((own_failures[name] == 2) == (name in missed) and own_failures[name] <= 2 for name in names)
