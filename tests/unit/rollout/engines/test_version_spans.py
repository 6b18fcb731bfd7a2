"""Every token is labelled with the version that sampled it, whoever counts."""

from typing import NamedTuple

import pytest

from rollout.engines.vllm.version_spans import counted_spans, labelled_spans
from rollout.types import VersionSpan


class Label(NamedTuple):
    start: int
    end: int
    version: str


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (None, ()),
        ([], ()),
        ([Label(0, 12, "4")], (VersionSpan(0, 12, 4),)),
        ([Label(0, 12, "4"), Label(12, 13, "5")], (VersionSpan(0, 12, 4), VersionSpan(12, 13, 5))),
        ([Label(0, 0, "4"), Label(0, 1, "15"), Label(1, 1, "16")], (VersionSpan(0, 1, 15),)),
    ],
)
def test_the_labels_of_the_engine_core_are_kept_to_the_token(
    labels: list[Label] | None, expected: tuple[VersionSpan, ...]
) -> None:
    assert labelled_spans(labels) == expected


@pytest.mark.parametrize(
    ("boundaries", "num_tokens", "expected"),
    [
        ([], 3, (VersionSpan(0, 3, 7),)),
        ([], 0, ()),
        ([(0, 4), (12, 5)], 30, (VersionSpan(0, 12, 4), VersionSpan(12, 30, 5))),
        ([(0, 4), (0, 5)], 2, (VersionSpan(0, 2, 5),)),
        ([(0, 4), (2, 5), (2, 6)], 3, (VersionSpan(0, 2, 4), VersionSpan(2, 3, 6))),
        ([(0, 4), (2, 5)], 2, (VersionSpan(0, 2, 4),)),
    ],
)
def test_without_labels_the_counts_at_updates_tell(
    boundaries: list[tuple[int, int]], num_tokens: int, expected: tuple[VersionSpan, ...]
) -> None:
    assert counted_spans(boundaries, num_tokens, live=7) == expected
